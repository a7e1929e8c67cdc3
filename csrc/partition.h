// How reductions are cut into pieces.
//
// Guarantee: a cut depends on one sample's shape and layout only, never on the number of samples
// or threads. Pieces are reduced by one kernel call each and combined in their order, so a sum has
// the same bits however the pieces are spread over threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "groupnorm.h"
#include "kernels.h"
#include "streaming.h"

namespace groupnorm {

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

inline bool empty(const Shape& shape) {
  return shape.samples == 0 || shape.channels == 0 || shape.spatial == 0;
}

inline std::int64_t widest_group(const Shape& shape) {
  std::int64_t widest = 0;
  for (std::int64_t k = 0; k < shape.groups(); ++k) {
    widest = std::max(widest, shape.group_channels(k));
  }
  return widest;
}

// 0 where groups differ.
inline std::int64_t equal_group_size(const Shape& shape) {
  const std::int64_t widest = widest_group(shape);
  return widest * shape.groups() == shape.channels ? widest : 0;
}

// Elements of a piece: large enough that combining costs nothing, small enough to split one image.
constexpr std::int64_t kPieceElements = 65536;
// Channels-last, a piece leaves three doubles per channel behind: at least this many rows share
// them, and at most this many pieces are cut from a sample.
constexpr std::int64_t kPieceRows = 32;
constexpr std::int64_t kColumnPieces = 64;

struct Piece {
  std::int64_t row, rows, begin, length;
};

// Some of a piece's channels, counted from its first: rows, or columns.
inline Piece channels_of(const Piece& piece, Layout layout, std::int64_t first,
                         std::int64_t count) {
  if (layout == Layout::channels_first) return {piece.row + first, count, piece.begin, piece.length};
  return {piece.row, piece.rows, piece.begin + first, count};
}

// rows x length elements cut into pieces of whole rows, or of parts of one row.
struct Cut {
  std::int64_t rows, length, row_step, length_step;

  std::int64_t per_row() const { return (length + length_step - 1) / length_step; }
  std::int64_t count() const {
    return rows == 0 || length == 0 ? 0 : (rows + row_step - 1) / row_step * per_row();
  }
  Piece at(std::int64_t i) const {
    const std::int64_t row = i / per_row() * row_step, begin = i % per_row() * length_step;
    return {row, std::min(row_step, rows - row), begin, std::min(length_step, length - begin)};
  }
};

inline Cut cut_rows(std::int64_t rows, std::int64_t length) {
  if (length > kPieceElements) return {rows, length, 1, kPieceElements};
  const std::int64_t whole = std::max<std::int64_t>(1, length);
  const std::int64_t most = std::max<std::int64_t>(1, rows);
  return {rows, length, std::clamp<std::int64_t>(kPieceElements / whole, 1, most), whole};
}

// Channels-last: rows are positions, and a piece is whole rows.
inline Cut cut_positions(const Shape& shape) {
  const std::int64_t channels = std::max<std::int64_t>(1, shape.channels);
  const std::int64_t step = std::max({kPieceRows, kPieceElements / channels,
                                      (shape.spatial + kColumnPieces - 1) / kColumnPieces});
  return {shape.spatial, shape.channels, step, channels};
}

// Channels-first: consecutive groups of one sample that a thread works on together. Small groups would
// spend more time on being called than on their elements.
struct GroupBatches {
  std::int64_t groups, per_batch, per_sample;

  GroupBatches(const Shape& shape, int threads) : groups(shape.groups()) {
    constexpr std::int64_t most_elements = 16384;
    const std::int64_t largest = std::max<std::int64_t>(1, widest_group(shape) * shape.spatial);
    // At least eight units for each thread, if there are as many groups.
    const std::int64_t fair = shape.samples * groups / (8 * threads);
    per_batch = std::clamp<std::int64_t>(most_elements / largest, 1, groups);
    if (threads > 1) per_batch = std::clamp<std::int64_t>(fair, 1, per_batch);
    per_sample = (groups + per_batch - 1) / per_batch;
  }

  struct Batch {
    std::int64_t sample, first_group, end_group, first_channel, end_channel;
  };
  Batch at(const Shape& shape, std::int64_t unit) const {
    const std::int64_t first = unit % per_sample * per_batch;
    const std::int64_t end = std::min(groups, first + per_batch);
    return {unit / per_sample, first, end, shape.group_begin[index(first)],
            shape.group_begin[index(end)]};
  }
  std::int64_t most_channels(const Shape& shape) const { return per_batch * widest_group(shape); }
};

// Rows of few channels a group, one position each: sixteen samples go through one kernel call, each in
// a lane. Not a matter of how many samples there are, because a sample's bits must not depend on that.
inline bool samples_in_lanes(const Shape& shape, const Epilogue& epilogue) {
  return shape.spatial == 1 && epilogue.scale.data == nullptr && epilogue.shift.data == nullptr &&
         widest_group(shape) <= kLaneChannels;
}
inline std::int64_t sample_blocks(const Shape& shape) {
  return (shape.samples + kLaneSamples - 1) / kLaneSamples;
}
// The backward's sums of so many blocks are one row: what one thread has written costs another as much to read as its
// elements did.
constexpr std::int64_t kBlocksOfARow = 4;
inline std::int64_t sum_blocks(const Shape& shape) {
  return (sample_blocks(shape) + kBlocksOfARow - 1) / kBlocksOfARow;
}

inline std::int64_t total_elements(const Shape& shape) {
  return shape.samples * shape.channels * shape.spatial;
}

inline std::int64_t element_size(DType dtype) {
  constexpr std::int64_t sizes[kDTypes] = {4, 8, 2, 2};
  return sizes[static_cast<int>(dtype)];
}

// What reading so many tensors of x's size is worth, in bytes of float32 that have no activation: what threads are
// woken for. The 16-bit types take as long as float32, and an activation as long again.
inline std::int64_t work(const Shape& shape, DType dtype, Activation activation, std::int64_t streams) {
  const std::int64_t element = std::max<std::int64_t>(4, element_size(dtype));
  return streams * total_elements(shape) * element * (is_smooth(activation) ? 2 : 1);
}

// Whether so many tensors of x's size may have to come from memory, or from a cache that is as slow:
// asking for rows ahead costs up to 7 % where they are close by, and saves up to half where they are not.
inline bool far(const Shape& shape, DType dtype, std::int64_t tensors) {
  constexpr std::int64_t kCached = std::int64_t{6} << 20;
  return tensors * total_elements(shape) * element_size(dtype) > kCached;
}

// Whether a result of x's size is better written around the caches: that of a forward where x and y are more than the
// shared cache holds, that of a backward where dy, x and dx are three quarters of it. The y of 16-bit types, which
// arithmetic binds, took a tenth longer where the shared cache is close, and through silu up to a third longer where it
// is distant.
inline bool leaves_caches(const Shape& shape, DType dtype, Activation activation) {
  if (element_size(dtype) == 2 && (is_smooth(activation) || !shared_cache_is_distant())) return false;
  return 2 * total_elements(shape) * element_size(dtype) >= stream_limit();
}
inline bool gradient_leaves_caches(const Shape& shape, DType dtype) {
  return 4 * total_elements(shape) * element_size(dtype) >= stream_limit();
}

// Whether each tensor of x's size fills it.
inline bool all_leave_caches(const Shape& shape, DType dtype) {
  return total_elements(shape) * element_size(dtype) >= stream_limit();
}

// The address of a row's element; a null array stays null.
inline const void* address(const Input& array, DType dtype, std::int64_t sample, std::int64_t row,
                           std::int64_t at) {
  if (array.data == nullptr) return nullptr;
  return static_cast<const char*>(array.data) +
         element_size(dtype) * (sample * array.sample_stride + row * array.row_stride + at);
}
inline void* address(const Output& array, DType dtype, std::int64_t sample, std::int64_t row,
                     std::int64_t at) {
  if (array.data == nullptr) return nullptr;
  return static_cast<char*>(array.data) +
         element_size(dtype) * (sample * array.sample_stride + row * array.row_stride + at);
}

}  // namespace groupnorm
