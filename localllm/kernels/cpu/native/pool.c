// Threads that take pieces of a job.
//
// One word says all that a thread needs to know before it has a piece: in its upper half the generation, a number that
// grows with each operation, and in its lower half the pieces that are not taken yet. A thread takes a piece by
// lowering the word with a compare-and-swap, which fails where the operation has changed meanwhile. Only a thread that
// holds a piece reads the job, and an operation with a piece outstanding cannot end. So no thread has to wait for one
// that was put aside without a piece, not even to free the job's memory.
//
// The thread that finishes an operation's last piece opens the next one.
#include "pool.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
  LINE = 64,                // bytes of a cache line
  PAUSES = 32,              // between two looks at the clock
  YIELD_AFTER_NS = 20000,   // a wait this long lets other threads of the processor run
  SLEEP_AFTER_NS = 1000000  // a wait this long ends in sleep: longer than the pause between two steps
};

typedef struct {
  Pool* pool;
  int64_t index;
  pthread_t id;
} Thread;

struct Pool {
  _Atomic uint64_t next;  // generation << 32 | pieces that are not taken yet
  char line_1[LINE];      // so that threads that write one of these do not delay those that read the others
  _Atomic int64_t done;   // pieces of the operation
  char line_2[LINE];
  const Job* job;             // as operation and pieces: written by the thread that opens an operation,
  int64_t operation, pieces;  // read by threads that hold one of its pieces
  _Atomic int asleep;         // threads
  _Atomic int stopping;
  _Atomic int running;  // a job has operations left
  pthread_mutex_t caller, sleep;
  pthread_cond_t wake;
  int64_t threads;
  Parallel parallel;  // NULL: the pool has threads of its own
  _Atomic int64_t members;  // borrowed threads that have joined the job
  pid_t process;
  void* shared;
  void (*free_shared)(void*);
  Thread workers[];  // threads 1 ..
};

// Waiting -------------------------------------------------------------------------------------------------------------

static void pause_briefly(void) {
  for (int i = 0; i < PAUSES; i++) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
  }
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

typedef struct {
  int64_t began_ns;  // 0: not begun
} Wait;

// Wait a moment. Returns for how long the wait has lasted.
static int64_t wait_more(Wait* wait) {
  pause_briefly();
  int64_t now = now_ns();
  if (!wait->began_ns) wait->began_ns = now;
  int64_t waited = now - wait->began_ns;
  if (waited > YIELD_AFTER_NS) sched_yield();  // a thread with a piece may be waiting for this processor
  return waited;
}

// Operations ----------------------------------------------------------------------------------------------------------

static int64_t left(uint64_t next) { return (int64_t)(uint32_t)next; }

static void wake_sleepers(Pool* pool) {
  if (!atomic_load(&pool->asleep)) return;
  pthread_mutex_lock(&pool->sleep);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->sleep);
}

// Open the first operation from `operation` on that has pieces, or end the job.
static void open_operation(Pool* pool, int64_t operation) {
  const Job* job = pool->job;
  int64_t pieces = 0;
  for (; operation < job->operations; operation++) {
    pieces = job->count_pieces(job->context, operation);
    if (pieces > 0) break;
  }
  if (operation >= job->operations) {
    atomic_store_explicit(&pool->running, 0, memory_order_release);
    return;
  }
  pool->operation = operation;
  pool->pieces = pieces;
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
  uint64_t generation = (atomic_load_explicit(&pool->next, memory_order_relaxed) >> 32) + 1;
  atomic_store(&pool->next, generation << 32 | (uint32_t)pieces);
  wake_sleepers(pool);
}

static int take_piece(Pool* pool, int64_t* piece) {
  uint64_t next = atomic_load_explicit(&pool->next, memory_order_relaxed);
  while (left(next)) {
    if (atomic_compare_exchange_weak_explicit(
            &pool->next, &next, next - 1, memory_order_acquire, memory_order_relaxed)) {
      *piece = pool->pieces - left(next);
      return 1;
    }
  }
  return 0;
}

// Take and run pieces until there are none.
static int run_pieces(Pool* pool, int64_t thread) {
  int64_t piece;
  int ran = 0;
  while (take_piece(pool, &piece)) {
    const Job* job = pool->job;
    int64_t operation = pool->operation, pieces = pool->pieces;
    job->run_piece(job->context, operation, piece, thread);
    if (atomic_fetch_add_explicit(&pool->done, 1, memory_order_acq_rel) + 1 == pieces) {
      open_operation(pool, operation + 1);
    }
    ran = 1;
  }
  return ran;
}

// Run pieces until the job is over.
static void take_part(Pool* pool, int64_t thread) {
  Wait wait = {0};
  while (atomic_load_explicit(&pool->running, memory_order_acquire)) {
    if (run_pieces(pool, thread)) {
      wait = (Wait){0};
    } else {
      wait_more(&wait);
    }
  }
}

static void join_job(void* pool) { take_part(pool, atomic_fetch_add(&((Pool*)pool)->members, 1)); }

static int is_forked(const Pool* pool) { return getpid() != pool->process; }

// A forked child has the pool, but not its threads: those that seem to sleep would never answer.
static void run_alone(const Job* job) {
  for (int64_t operation = 0; operation < job->operations; operation++) {
    const int64_t pieces = job->count_pieces(job->context, operation);
    for (int64_t piece = 0; piece < pieces; piece++) job->run_piece(job->context, operation, piece, 0);
  }
}

void run_job(Pool* pool, const Job* job) {
  if (is_forked(pool)) {
    run_alone(job);
    return;
  }
  pool->job = job;
  atomic_store_explicit(&pool->running, 1, memory_order_relaxed);
  open_operation(pool, 0);
  if (pool->parallel) {
    atomic_store(&pool->members, 0);
    pool->parallel(join_job, pool, (unsigned)pool->threads, 0);
  } else {
    take_part(pool, 0);
  }
}

// Threads -------------------------------------------------------------------------------------------------------------

static void sleep_until_work(Pool* pool) {
  pthread_mutex_lock(&pool->sleep);
  atomic_fetch_add(&pool->asleep, 1);
  while (!left(atomic_load(&pool->next)) && !atomic_load(&pool->stopping)) pthread_cond_wait(&pool->wake, &pool->sleep);
  atomic_fetch_sub(&pool->asleep, 1);
  pthread_mutex_unlock(&pool->sleep);
}

static void* run_thread(void* argument) {
  Thread* thread = argument;
  Pool* pool = thread->pool;
  Wait wait = {0};
  while (!atomic_load_explicit(&pool->stopping, memory_order_relaxed)) {
    if (run_pieces(pool, thread->index)) {
      wait = (Wait){0};
    } else if (wait_more(&wait) > SLEEP_AFTER_NS) {
      sleep_until_work(pool);
      wait = (Wait){0};
    }
  }
  return 0;
}

Pool* localllm_open_pool(int64_t threads, Parallel parallel) {
  if (threads < 1) threads = 1;
  Pool* pool = calloc(1, sizeof(Pool) + (size_t)(threads - 1) * sizeof(Thread));
  if (!pool) return NULL;
  pool->threads = parallel ? threads : 1;
  pool->parallel = parallel;
  pool->process = getpid();
  pthread_mutex_init(&pool->caller, NULL);
  pthread_mutex_init(&pool->sleep, NULL);
  pthread_cond_init(&pool->wake, NULL);
  for (; pool->threads < threads; pool->threads++) {  // none if they are borrowed
    Thread* thread = &pool->workers[pool->threads - 1];
    *thread = (Thread){.pool = pool, .index = pool->threads};
    if (pthread_create(&thread->id, NULL, run_thread, thread)) break;
  }
  return pool;
}

static void end_threads(Pool* pool) {
  pthread_mutex_lock(&pool->sleep);
  atomic_store(&pool->stopping, 1);
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->sleep);
  for (int64_t i = 0; i < pool->threads - 1 && !pool->parallel; i++) pthread_join(pool->workers[i].id, NULL);
}

void localllm_close_pool(Pool* pool) {
  lock_pool(pool);
  if (!is_forked(pool)) {
    end_threads(pool);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->sleep);
  }
  unlock_pool(pool);
  if (pool->free_shared) pool->free_shared(pool->shared);
  pthread_mutex_destroy(&pool->caller);
  free(pool);
}

int64_t pool_threads(const Pool* pool) { return pool->threads; }

void lock_pool(Pool* pool) { pthread_mutex_lock(&pool->caller); }

void unlock_pool(Pool* pool) { pthread_mutex_unlock(&pool->caller); }

void* pool_shared(const Pool* pool) { return pool->shared; }

void set_pool_shared(Pool* pool, void* shared, void (*free_shared)(void*)) {
  pool->shared = shared;
  pool->free_shared = free_shared;
}
