// A vector operation that is called instead of inlined costs more than it computes.
#pragma once

#define GROUPNORM_INLINE inline __attribute__((always_inline))
// The same for a lambda, after its parameters.
#define GROUPNORM_INLINE_LAMBDA __attribute__((always_inline))
