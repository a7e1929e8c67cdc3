// For instruction sets that gain nothing from two vectors at a time: one after the other. The kernels then
// call load_wide, load_split_wide and add_split_two only; the rest is there for what they leave out to compile.
#pragma once

namespace groupnorm {
namespace {

// Whether loops take two vectors at a time.
constexpr bool kTwoVectors = false;

GROUPNORM_INLINE F64 load_wide(const Float16* p) { return widen(load(p)); }
GROUPNORM_INLINE F64 load_split_wide(const BFloat16* p) { return widen(load_split(p)); }

GROUPNORM_INLINE Two<F32> load_split_two(const BFloat16* p) {
  return {load_split(p), load_split(p + kLanes)};
}
GROUPNORM_INLINE void store_split_two(BFloat16* p, const Two<F32>& a) {
  store_split(p, a.first);
  store_split(p + kLanes, a.second);
}
GROUPNORM_INLINE void store_normal_split_two(BFloat16* p, const Two<F32>& a) { store_split_two(p, a); }
// Nothing is written around the caches.
constexpr bool kStreams = false;
template <class T, class V>
GROUPNORM_INLINE void stream(T* p, const V& a) {
  store_as(p, a, kLanes);
}
GROUPNORM_INLINE void stream_split_two(BFloat16* p, const Two<F32>& a) { store_split_two(p, a); }
GROUPNORM_INLINE void stream_normal_split_two(BFloat16* p, const Two<F32>& a) { store_split_two(p, a); }
GROUPNORM_INLINE void finish_streams() {}
GROUPNORM_INLINE Two<F32> to_split_two(const Two<F32>& a) {
  return {to_split(a.first), to_split(a.second)};
}
GROUPNORM_INLINE Two<F32> from_split_two(const Two<F32>& a) {
  return {from_split(a.first), from_split(a.second)};
}
// |a| below its limit in any lane; without kVaries, all limits are alike.
template <bool kVaries>
GROUPNORM_INLINE bool any_magnitude_lt(const Two<F32>& a, const Two<F32>& limit) {
  return any_lt<kVaries>(abs(a.first), limit.first, abs(a.second), limit.second);
}
// a below its limit, the same.
template <bool kVaries>
GROUPNORM_INLINE bool any_lt(const Two<F32>& a, const Two<F32>& limit) {
  return any_lt<kVaries>(a.first, limit.first, a.second, limit.second);
}
// Whether neither of these two holds.
template <bool kVaries>
GROUPNORM_INLINE bool none_below(const Two<F32>& a, const Two<F32>& magnitude, const Two<F32>& b,
                                 const Two<F32>& limit) {
  return !any_magnitude_lt<kVaries>(a, magnitude) && !any_lt<kVaries>(b, limit);
}
// The sum of the vectors, in split order.
GROUPNORM_INLINE F32 add_split_two(const Two<F32>& a) { return a.first + a.second; }

}  // namespace
}  // namespace groupnorm
