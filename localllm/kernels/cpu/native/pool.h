// A pool of threads that take pieces of work. An operation is over when its pieces are done: a thread that the system
// has put aside delays no other thread unless it has a piece.
#pragma once
#include <stdint.h>

typedef struct Pool Pool;

// Operations that run one after the other, each in pieces that run at the same time.
typedef struct {
  void* context;
  int64_t operations;
  int64_t (*count_pieces)(void* context, int64_t operation);
  void (*run_piece)(void* context, int64_t operation, int64_t piece, int64_t thread);  // thread: 0 .. threads - 1
} Job;

// GOMP_parallel of libgomp: runs body(data) in `threads` threads, the calling one included, and waits for all of them.
typedef void (*Parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Open a pool of `threads`, the calling one included; NULL without memory. Where the system refuses threads, the pool
// has fewer. With `parallel` the pool starts none and borrows OpenMP's: beside operations that use OpenMP, threads of the
// pool would wait for processors on which OpenMP's threads spin. Without it (NULL) it has its own, which take part in a
// job as soon as the system runs them.
Pool* localllm_open_pool(int64_t threads, Parallel parallel);

// End the threads, and free the pool. Waits for a job that is running.
void localllm_close_pool(Pool*);

int64_t pool_threads(const Pool*);

// Hold the pool for one caller. Others wait.
void lock_pool(Pool*);
void unlock_pool(Pool*);

// Run a job to its end, with the calling thread as thread 0. The caller holds the pool.
void run_job(Pool*, const Job*);

// A pointer that jobs share from call to call. `free_shared` frees it when the pool is closed.
void* pool_shared(const Pool*);
void set_pool_shared(Pool*, void* shared, void (*free_shared)(void*));
