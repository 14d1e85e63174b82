// A pool of threads that take pieces of work. An operation is over when its pieces are done: a thread that the system
// has put aside delays nobody unless it has a piece.
#pragma once
#include <stdint.h>
#include "products.h"

typedef struct Pool Pool;

// threads: the caller's included.
Pool* localllm_open_pool(int64_t threads);
void localllm_close_pool(Pool*);
