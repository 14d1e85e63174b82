// Attention of one token over its request's paged cache, and the matrices of its heads.
#pragma once
#include "step.h"

// Return the pieces of one row and one KV head.
int64_t attention_pieces(const Attention*, int64_t position);

// Floats that a thread needs.
int64_t attention_floats(const Attention*);

// Floats that the result of one piece takes.
int64_t attention_result_floats(const Attention*);

// Write k and v of KV head `head`, from x = [q, k, v], to the cache. `memory`: attention_floats.
void store_piece(const Attention*, const StepRow*, const float* x, int64_t head, float* memory);

// Attend from the query heads of KV head `head` to the positions of `piece`, from x = [q, k, v]. If it `stores`, the last
// piece also writes k and v to the cache. `memory`: attention_floats; `result`: attention_result_floats.
void attend_piece(
    const Attention*, const StepRow*, const float* x, int64_t head, int64_t piece, int64_t stores, float* memory,
    float* result);

// Floats that a thread needs for `multiply_head`.
int64_t head_product_floats(const HeadProducts*);

// Multiply one head of all rows. `memory`: head_product_floats.
void multiply_head(
    const HeadProducts*, int64_t head, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
    float* memory);

// Join the results of all pieces of KV head `head` into y [heads, value_dim].
void join_pieces(const Attention*, int64_t head, int64_t pieces, const float* results, float* y);
