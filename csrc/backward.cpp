// The backward drivers: cut the work, run reduce and apply, and the small sums between them.
#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "buffer.h"
#include "channel_table.h"
#include "finite.h"
#include "groupnorm.h"
#include "kernels.h"
#include "parallel.h"
#include "partition.h"
#include "small_samples.h"
#include "strategy.h"

namespace groupnorm {
namespace {

// dv kept between the two halves saves the activation's second evaluation. float32 and float64 keep it where dx will
// be; for the 16-bit types a thread has a megabyte at most.
constexpr std::int64_t kKeptElements = 262144;

// Memory for dv, unwritten until it is used.
class Kept {
 public:
  explicit Kept(std::int64_t elements) : data_(index(elements)) {}

  // How many elements there is room for from a place on.
  std::int64_t room(std::int64_t place) const {
    return std::max<std::int64_t>(0, static_cast<std::int64_t>(data_.size()) - place);
  }
  float* at(std::int64_t place) { return data_.data() + place; }

 private:
  Buffer<float, 1024> data_;
};

// What the dv of so many rows takes there: rows of whole vectors, as the kernels keep it.
std::int64_t kept_room(std::int64_t rows, std::int64_t length) {
  return rows * ((length + kKeptVector - 1) / kKeptVector * kKeptVector);
}

// Where the dv of a piece's first channels is kept.
struct KeptPiece {
  void* data = nullptr;
  std::int64_t row_stride = 0, channels = 0;
};

// The mean terms of all groups of one sample.
using SampleMeans = Buffer<GradientMeans, 32>;

enum class Halves { reduce, apply, both };

struct GradientJob {
  const Shape& shape;
  DType dtype;
  Input dy, x;
  const double* mean;
  const double* rstd;
  const Epilogue& epilogue;
  Sums sums;
  Output dx;
  Halves halves;
  int threads;
  bool whole_groups = false;  // each by one thread
  const Affines affines{shape, dtype, epilogue, threads};
  const Kernels& table = kernels();

  bool rows_are_channels() const { return shape.layout == Layout::channels_first; }

  void fill(ChannelScratch& scratch, int thread, std::int64_t n, std::int64_t begin,
            std::int64_t end) const {
    const std::int64_t first = n * shape.groups();
    scratch.fill(shape, affines.of(thread), n, begin, end, {mean + first, nullptr, rstd + first});
  }

  // Where the sums of sample n from a channel on belong.
  double* sums_a(std::int64_t n, std::int64_t channel) const {
    return sums.a + n * shape.channels + channel;
  }
  double* sums_b(std::int64_t n, std::int64_t channel) const {
    return sums.b == nullptr ? nullptr : sums.b + n * shape.channels + channel;
  }

  bool keeps_dv() const {
    return halves == Halves::both && dx.data != nullptr && is_smooth(epilogue.activation) &&
           (rows_are_channels() ? shape.spatial : shape.channels) >= kNarrow;
  }
  // So that dx can be streamed past a distant cache, float32 keeps it in a thread's own memory if that holds a group; of
  // tensors that such a cache holds, dx is the better place.
  bool keeps_dv_apart() const {
    return dtype == DType::float32 && whole_groups && all_leave_caches(shape, dtype) && shared_cache_is_distant() &&
           kept_room(widest_group(shape), shape.spatial) <= kKeptElements;
  }
  bool keeps_dv_in_dx() const {
    return keeps_dv() && (dtype == DType::float64 || (dtype == DType::float32 && !keeps_dv_apart()));
  }

  // How much memory to have for dv that takes so much: enough for the first pieces.
  std::int64_t kept_elements(std::int64_t room) const {
    return keeps_dv() && !keeps_dv_in_dx() ? std::min(room, kKeptElements) : 0;
  }

  KeptPiece kept_piece(Kept& kept, std::int64_t place, std::int64_t n,
                       const Piece& piece) const {
    const std::int64_t channels = rows_are_channels() ? piece.rows : piece.length;
    if (keeps_dv_in_dx()) {
      return {address(dx, dtype, n, piece.row, piece.begin), dx.row_stride, channels};
    }
    const std::int64_t row = kept_room(1, piece.length), rows = kept.room(place) / row;
    const bool joined =
        rows_are_channels() && table.joins_gradient_rows(piece.length, {dy.row_stride, x.row_stride, dx.row_stride});
    const std::int64_t stride = joined ? piece.length : row;
    if (rows >= piece.rows) return {kept.at(place), stride, channels};
    // As many rows as there is room for; columns have parts in every row.
    if (rows == 0 || !rows_are_channels()) return {};
    return {kept.at(place), stride, rows};
  }

  // Columns are kept in vectors from the first one on, which those of another run are not.
  KeptPiece keepable(const ChannelScratch& scratch, const KeptPiece& dv) const {
    const bool anywhere = rows_are_channels() || keeps_dv_in_dx() || scratch.one_run();
    return anywhere ? dv : KeptPiece{};
  }

  // body(first, count, table, in_double, dv) over runs of channels that share an arithmetic and whose dv is
  // kept, or is not.
  template <class Body>
  void for_each_run(const ChannelScratch& scratch, const KeptPiece& dv, const Body& body) const {
    const KeptPiece here = keepable(scratch, dv);
    scratch.for_each_run([&](std::int64_t first, std::int64_t count, const ChannelTable& channels,
                             int in_double) {
      const std::int64_t kept = std::clamp<std::int64_t>(here.channels - first, 0, count);
      if (kept > 0) body(first, kept, channels, in_double, here);
      if (kept == count) return;
      body(first + kept, count - kept, scratch.table_from(first + kept), in_double, KeptPiece{});
    });
  }

  // Sums of one piece, dv and dv * xhat, per channel of the piece.
  void reduce(ChannelScratch& scratch, std::int64_t n, const Piece& piece, double* a, double* b,
              const KeptPiece& dv) const {
    if (sums.b == nullptr) b = nullptr;
    if (!rows_are_channels() && piece.length < kNarrow && !scratch.one_arithmetic()) {
      return reduce_narrow_columns(scratch, n, piece, a, b);
    }
    for_each_run(scratch, dv, [&](std::int64_t first, std::int64_t count, const ChannelTable& channels,
                                  int in_double, const KeptPiece& kept) {
      reduce_run(channels, n, piece, first, count, in_double, a, b, kept);
      if (in_double == 0) mend_float_sums(scratch, n, piece, first, count, a, b);
    });
  }

  // Few columns of two arithmetics: all of them in both, because a part of such a plane is summed in another order than the
  // whole (narrow-inl.h), and the bits of one channel must not depend on what another holds.
  void reduce_narrow_columns(ChannelScratch& scratch, std::int64_t n, const Piece& piece, double* a, double* b) const {
    double exact_a[kNarrow], exact_b[kNarrow];
    const ChannelTable channels = scratch.table_from(0);
    reduce_run(channels, n, piece, 0, piece.length, 1, exact_a, b == nullptr ? nullptr : exact_b, {});
    reduce_run(channels, n, piece, 0, piece.length, 0, a, b, {});
    mend_float_sums(scratch, n, piece, 0, piece.length, a, b);
    for (std::int64_t c = 0; c < piece.length; ++c) {
      if (!scratch.in_double(c)) continue;
      a[c] = exact_a[c];
      if (b != nullptr) b[c] = exact_b[c];
    }
  }

  // Channels [first, first + count) of the piece; a, b and dv are those of the whole piece.
  void reduce_run(const ChannelTable& channels, std::int64_t n, const Piece& piece,
                  std::int64_t first, std::int64_t count, int in_double, double* a, double* b,
                  const KeptPiece& dv) const {
    const Piece part = channels_of(piece, shape.layout, first, count);
    const ReducePlane plane = {address(dy, dtype, n, part.row, part.begin),
                               address(x, dtype, n, part.row, part.begin),
                               part.rows,
                               part.length,
                               dy.row_stride,
                               x.row_stride,
                               channels,
                               epilogue.beta,
                               a + first,
                               b == nullptr ? nullptr : b + first,
                               kept_from(dv, first),
                               dv.row_stride,
                               rows_are_channels() ? far(shape, dtype, 1) : far(shape, dtype, 2)};
    table.reduce[static_cast<int>(dtype)][static_cast<int>(epilogue.activation)]
                [static_cast<int>(shape.layout)][in_double](plane);
  }

  // Where a channel's dv begins, the channel counted from the piece's first.
  void* kept_from(const KeptPiece& dv, std::int64_t channel) const {
    if (dv.data == nullptr) return nullptr;
    const std::int64_t size = dtype == DType::float64 ? sizeof(double) : sizeof(float);
    return static_cast<char*>(dv.data) + size * (rows_are_channels() ? channel * dv.row_stride : channel);
  }

  // Sums of a kernel in float: put back what one float could not hold of the mean, and take those
  // that left the range of float again in double.
  void mend_float_sums(ChannelScratch& scratch, std::int64_t n, const Piece& piece,
                       std::int64_t first, std::int64_t count, double* a, double* b) const {
    // A product with 0 is 0, or NaN for what is not finite: additions the compiler can do in lanes.
    const double broken = b == nullptr
                              ? zero_if_finite(a + first, count)
                              : table.put_back_xhat_low(b + first, a + first, scratch.xhat_low() + first, count);
    if (broken == 0.0) return;
    scratch.fill_exact();
    // Only the channels that need it: the bits of one must not depend on what another holds.
    const auto needs_it = [&](std::int64_t i) {
      return (not_finite(a[i]) | (b == nullptr ? 0u : not_finite(b[i]))) != 0;
    };
    if (rows_are_channels()) {
      for (std::int64_t i = first; i < first + count; ++i) {
        if (needs_it(i)) reduce_run(scratch.table_from(i), n, piece, i, 1, 1, a, b, {});
      }
      return;
    }
    std::vector<double> again(index(2 * (first + count)));
    double* again_a = again.data();
    double* again_b = b == nullptr ? nullptr : again_a + first + count;
    reduce_run(scratch.table_from(first), n, piece, first, count, 1, again_a, again_b, {});
    for (std::int64_t i = first; i < first + count; ++i) {
      if (!needs_it(i)) continue;
      a[i] = again_a[i];
      if (b != nullptr) b[i] = again_b[i];
    }
  }

  // The last argument is where reduce has kept dv of the same piece.
  void apply(const ChannelScratch& scratch, std::int64_t n, const Piece& piece,
             const KeptPiece& kept_by_reduce) const {
    for_each_run(scratch, kept_by_reduce, [&](std::int64_t first, std::int64_t count,
                                              const ChannelTable& channels, int in_double,
                                              const KeptPiece& dv) {
      const Piece part = channels_of(piece, shape.layout, first, count);
      const bool wide = dtype == DType::float64, kept = dv.data != nullptr && (wide || in_double == 0);
      const ApplyPlane plane = {
          kept ? kept_from(dv, first) : address(dy, dtype, n, part.row, part.begin),
          address(x, dtype, n, part.row, part.begin),
          address(dx, dtype, n, part.row, part.begin),
          part.rows,
          part.length,
          kept ? dv.row_stride : dy.row_stride,
          x.row_stride,
          dx.row_stride,
          channels,
          epilogue.beta,
          far(shape, dtype, 3),
          // What was kept in dx is in cache.
          gradient_leaves_caches(shape, dtype) && !keeps_dv_in_dx()};
      const auto t = static_cast<int>(dtype), layout = static_cast<int>(shape.layout);
      if (kept && !wide) {
        table.apply_kept[t][layout](plane);
      } else {
        const Activation left = kept ? Activation::none : epilogue.activation;
        table.apply[t][static_cast<int>(left)][layout][in_double](plane);
      }
    });
  }

  // The [N, C] sums of channels [begin, end) of sample n start at zero ...
  void clear_sums(std::int64_t n, std::int64_t begin, std::int64_t end) const {
    const std::int64_t first = n * shape.channels;
    std::fill(sums.a + first + begin, sums.a + first + end, 0.0);
    if (sums.b != nullptr) std::fill(sums.b + first + begin, sums.b + first + end, 0.0);
  }
  // ... and grow by the sums of pieces in their order.
  void add_sums(std::int64_t n, std::int64_t begin, std::int64_t end, const double* a,
                const double* b) const {
    const std::int64_t first = n * shape.channels + begin;
    for (std::int64_t i = 0; i < end - begin; ++i) {
      sums.a[first + i] += a[i];
      if (sums.b != nullptr) sums.b[first + i] += b[i];
    }
  }

  GradientMeans means(const Affine& affine, std::int64_t n, std::int64_t k) const {
    const double* a = sums.a + n * shape.channels;
    const double* b = sums.b + n * shape.channels;
    const double elements =
        static_cast<double>(shape.group_channels(k)) * static_cast<double>(shape.spatial);
    const double* gains = affine.gains() + affine.place(n, 0);
    const std::int64_t end = shape.group_begin[index(k) + 1];
    // In two lanes, because one sum would wait for its last addition.
    double p[2] = {}, q[2] = {};
    std::int64_t c = shape.group_begin[index(k)];
    for (; c + 2 <= end; c += 2) {
      for (int lane = 0; lane < 2; ++lane) {
        p[lane] += gains[c + lane] * a[c + lane];
        q[lane] += gains[c + lane] * b[c + lane];
      }
    }
    if (c < end) {
      p[0] += gains[c] * a[c];
      q[0] += gains[c] * b[c];
    }
    return {(p[0] + p[1]) / elements, (q[0] + q[1]) / elements};
  }

  // Of all groups of a sample; to be called by the calling thread.
  void means(std::int64_t n, SampleMeans& result) const {
    const Affine& affine = affines.of(0);
    for (std::int64_t k = 0; k < shape.groups(); ++k) result[index(k)] = means(affine, n, k);
  }
};

// A thread's own memory: coefficients, the sums of a piece, a sample's mean terms, and dv.
struct Workspace {
  ChannelScratch scratch;
  Values a, b;
  SampleMeans means;
  Kept kept;

  Workspace(const GradientJob& job, std::int64_t channels, std::int64_t kept_elements)
      : scratch(job.dtype, job.epilogue, channels, true),
        a(index(channels)),
        b(index(channels)),
        means(index(job.shape.groups())),
        kept(kept_elements) {}
};

// Reduce and then apply for channels [begin, end) of a sample on one thread, while they are in cache;
// piece(i) is the i-th of count.
template <class PieceAt>
void both_halves(const GradientJob& job, int thread, Workspace& mine, std::int64_t n,
                 std::int64_t begin, std::int64_t end, std::int64_t first_group, std::int64_t end_group,
                 std::int64_t count, const PieceAt& piece_at) {
  std::int64_t place = 0;
  job.fill(mine.scratch, thread, n, begin, end);
  if (count > 1) job.clear_sums(n, begin, end);
  for (std::int64_t i = 0; i < count; ++i) {
    const Piece piece = piece_at(i);
    const KeptPiece kept = job.kept_piece(mine.kept, place, n, piece);
    place += kept_room(piece.rows, piece.length);
    if (count == 1) {
      job.reduce(mine.scratch, n, piece, job.sums_a(n, begin), job.sums_b(n, begin), kept);
    } else {
      job.reduce(mine.scratch, n, piece, mine.a.data(), mine.b.data(), kept);
      job.add_sums(n, begin, end, mine.a.data(), mine.b.data());
    }
  }
  if (job.dx.data == nullptr) return;
  const Affine& affine = job.affines.of(thread);
  for (std::int64_t k = first_group; k < end_group; ++k) mine.means[index(k)] = job.means(affine, n, k);
  mine.scratch.fill_means(mine.means.data());
  // From the end, where what was read last is still in cache.
  for (std::int64_t i = count - 1; i >= 0; --i) {
    const Piece piece = piece_at(i);
    place -= kept_room(piece.rows, piece.length);
    job.apply(mine.scratch, n, piece, job.kept_piece(mine.kept, place, n, piece));
  }
}

// The three ways keep their workspaces on the stack: inlined, all of them would be on it at once.

// Whole groups, a few at a time.
[[gnu::noinline]] void rows_by_group(const GradientJob& job) {
  const Shape& shape = job.shape;
  const int threads = job.threads;
  const GroupBatches batches(shape, threads);
  const std::int64_t widest = batches.most_channels(shape);
  PerThread<Workspace> workspaces(index(threads), job, widest,
                                  job.kept_elements(kept_room(widest, shape.spatial)));
  const Cut cut = cut_rows(1, shape.spatial);
  parallel_ranges(shape.samples * batches.per_sample, threads,
                  [&](std::int64_t begin, std::int64_t end, int thread) {
                    for (std::int64_t i = begin; i < end; ++i) {
                      const auto batch = batches.at(shape, i);
                      const std::int64_t first = batch.first_channel, last = batch.end_channel;
                      both_halves(job, thread, workspaces[index(thread)], batch.sample, first, last,
                                  batch.first_group, batch.end_group, cut.count(),
                                  [&](std::int64_t p) {
                                    const Piece part = cut.at(p);
                                    return Piece{first, last - first, part.begin, part.length};
                                  });
                    }
                  });
}

// Whole samples, one after the other.
[[gnu::noinline]] void columns_by_sample(const GradientJob& job) {
  const Shape& shape = job.shape;
  const int threads = job.threads;
  PerThread<Workspace> workspaces(index(threads), job, shape.channels,
                                  job.kept_elements(kept_room(shape.spatial, shape.channels)));
  const Cut cut = cut_positions(shape);
  parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t n = begin; n < end; ++n) {
      both_halves(job, thread, workspaces[index(thread)], n, 0, shape.channels, 0, shape.groups(),
                  cut.count(), [&](std::int64_t p) { return cut.at(p); });
    }
  });
}

// Sixteen samples of one position each at a time.
void samples_in_blocks(const GradientJob& job) {
  const Shape& shape = job.shape;
  parallel_ranges(
      sum_blocks(shape), job.threads, [&](std::int64_t begin, std::int64_t end, int thread) {
        const Affine& affine = job.affines.of(thread);
        const std::int64_t last = std::min(end * kBlocksOfARow, sample_blocks(shape));
        for (std::int64_t block = begin * kBlocksOfARow; block < last; ++block) {
          const std::int64_t n = block * kLaneSamples, first = n * shape.groups();
          const SamplesPlane plane = {address(job.x, job.dtype, n, 0, 0),
                                      address(job.dy, job.dtype, n, 0, 0),
                                      address(job.dx, job.dtype, n, 0, 0),
                                      job.x.sample_stride,
                                      job.dy.sample_stride,
                                      job.dx.sample_stride,
                                      std::min(kLaneSamples, shape.samples - n),
                                      shape.channels,
                                      shape.groups(),
                                      equal_group_size(shape),
                                      shape.group_begin.data(),
                                      affine.gains(),
                                      affine.offsets(),
                                      0.0,
                                      job.epilogue.beta,
                                      const_cast<double*>(job.mean) + first,
                                      const_cast<double*>(job.rstd) + first,
                                      job.sums_a(block / kBlocksOfARow, 0),
                                      job.sums_b(block / kBlocksOfARow, 0),
                                      block % kBlocksOfARow != 0};
          job.table.samples_backward[static_cast<int>(job.dtype)]
                                    [static_cast<int>(job.epilogue.activation)](plane);
        }
      });
}

// The pieces of one sample, to be spread over all threads.
struct SampleCut {
  bool rows_are_channels;
  std::int64_t channels;
  Cut cut;

  explicit SampleCut(const Shape& shape)
      : rows_are_channels(shape.layout == Layout::channels_first),
        channels(shape.channels),
        cut(rows_are_channels ? cut_rows(shape.channels, shape.spatial) : cut_positions(shape)) {}

  // Channels that a piece covers.
  std::int64_t first_channel(const Piece& piece) const { return rows_are_channels ? piece.row : 0; }
  std::int64_t channel_count(const Piece& piece) const {
    return rows_are_channels ? piece.rows : channels;
  }
  // The most channels that any piece covers.
  std::int64_t channel_capacity() const { return rows_are_channels ? cut.row_step : channels; }

  // Where the dv of the i-th piece is kept, with all of the sample's.
  std::int64_t place(std::int64_t i) const { return i * kept_room(cut.row_step, cut.length_step); }
};

void split_reduce(const GradientJob& job, const SampleCut& parts, std::int64_t n,
                  PerThread<Workspace>& workspaces, Kept& kept) {
  const std::int64_t widest = parts.channel_capacity(), count = parts.cut.count();
  Values partial(index(2 * widest * count));
  const auto sums_of = [&](std::int64_t i) { return partial.data() + 2 * widest * i; };
  parallel_ranges(count, job.threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    ChannelScratch& scratch = workspaces[index(thread)].scratch;
    for (std::int64_t i = begin; i < end; ++i) {
      const Piece piece = parts.cut.at(i);
      const std::int64_t first = parts.first_channel(piece);
      if (parts.rows_are_channels || i == begin) {
        job.fill(scratch, thread, n, first, first + parts.channel_count(piece));
      }
      job.reduce(scratch, n, piece, sums_of(i), sums_of(i) + widest,
                 job.kept_piece(kept, parts.place(i), n, piece));
    }
  });
  job.clear_sums(n, 0, job.shape.channels);
  for (std::int64_t i = 0; i < count; ++i) {
    const Piece piece = parts.cut.at(i);
    const std::int64_t first = parts.first_channel(piece);
    job.add_sums(n, first, first + parts.channel_count(piece), sums_of(i), sums_of(i) + widest);
  }
}

void split_apply(const GradientJob& job, const SampleCut& parts, std::int64_t n,
                 PerThread<Workspace>& workspaces, Kept& kept, SampleMeans& means) {
  job.means(n, means);
  const std::int64_t pieces = parts.cut.count();
  parallel_ranges(pieces, job.threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    ChannelScratch& scratch = workspaces[index(thread)].scratch;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at = from_share_end(i, pieces, job.threads);
      const Piece piece = parts.cut.at(at);
      const std::int64_t first = parts.first_channel(piece);
      if (parts.rows_are_channels || i == begin) {
        job.fill(scratch, thread, n, first, first + parts.channel_count(piece));
        scratch.fill_means(means.data());
      }
      job.apply(scratch, n, piece, job.kept_piece(kept, parts.place(at), n, piece));
    }
  });
}

[[gnu::noinline]] void split(const GradientJob& job) {
  const int threads = job.threads;
  const SampleCut parts(job.shape);
  // Not on the stack: this is the way of large tensors, which save nothing by it.
  const auto workspaces = std::make_unique<PerThread<Workspace>>(
      index(threads), job, parts.channel_capacity(), std::int64_t{0});
  // One memory for all: another thread may apply what this one has reduced.
  const std::int64_t room = parts.place(parts.cut.count());
  const auto kept = std::make_unique<Kept>(std::min(room, threads * job.kept_elements(room)));
  SampleMeans means(index(job.shape.groups()));
  for (std::int64_t n = 0; n < job.shape.samples; ++n) {
    if (job.halves != Halves::apply) split_reduce(job, parts, n, *workspaces, *kept);
    if (job.halves != Halves::reduce && job.dx.data != nullptr) {
      split_apply(job, parts, n, *workspaces, *kept, means);
    }
  }
}

// The sums of one small sample, or its dx from them, or both.
void small_sample(const Shape& shape, DType dtype, const Input& dy, const Input& x, const double* mean,
                  const double* rstd, const Epilogue& epilogue, const Sums& sums, const Output& dx, Halves halves,
                  std::int64_t n) {
  double values[kSmallSample], dv[kSmallSample];
  const bool reads_x = sums.b != nullptr;
  const std::int64_t first = n * shape.channels, positions = shape.spatial;
  for (std::int64_t k = 0; k < shape.groups(); ++k) {
    const std::int64_t begin = shape.group_begin[index(k)], end = shape.group_begin[index(k) + 1];
    const double m = mean[n * shape.groups() + k], r = rstd[n * shape.groups() + k];
    double p = 0.0, q = 0.0;
    for (std::int64_t c = begin; c < end; ++c) {
      double *x_c = values + (c - begin) * positions, *dv_c = dv + (c - begin) * positions;
      load_channel(dy, shape, dtype, n, c, dv_c);
      if (reads_x) {
        load_channel(x, shape, dtype, n, c, x_c);
        for (std::int64_t i = 0; i < positions; ++i) x_c[i] -= m;
      }
      if (halves != Halves::apply) {
        double a = 0.0, b = 0.0;
        for (std::int64_t i = 0; i < positions; ++i) a += dv_c[i];
        sums.a[first + c] = a;
        if (reads_x) {
          for (std::int64_t i = 0; i < positions; ++i) b += dv_c[i] * (x_c[i] * r);
          sums.b[first + c] = b;
        }
      }
      if (dx.data == nullptr) continue;
      const double gain = parameter_or(epilogue.weight, c, 1.0);
      p += gain * sums.a[first + c];
      q += gain * sums.b[first + c];
    }
    if (dx.data == nullptr) continue;
    // What is not finite makes all of its group NaN.
    if ((not_finite(p) | not_finite(q)) != 0) p = q = std::numeric_limits<double>::quiet_NaN();
    const double elements = static_cast<double>((end - begin) * positions);
    const double offset = -r * (p / elements), slope = r * r * (q / elements);
    for (std::int64_t c = begin; c < end; ++c) {
      double *x_c = values + (c - begin) * positions, *dv_c = dv + (c - begin) * positions;
      const double multiplier = parameter_or(epilogue.weight, c, 1.0) * r;
      for (std::int64_t i = 0; i < positions; ++i) dv_c[i] = dv_c[i] * multiplier + (offset - x_c[i] * slope);
      store_channel(dx, shape, dtype, n, c, dv_c);
    }
  }
}

void small_samples(const Shape& shape, DType dtype, const Input& dy, const Input& x, const double* mean,
                   const double* rstd, const Epilogue& epilogue, const Sums& sums, const Output& dx, Halves halves,
                   int threads) {
  refuse_unknown_isa();
  parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t n = begin; n < end; ++n) {
      small_sample(shape, dtype, dy, x, mean, rstd, epilogue, sums, dx, halves, n);
    }
  });
}

bool cleared_because_empty(const Shape& shape, Sums sums, std::int64_t rows) {
  if (!empty(shape)) return false;
  const std::int64_t count = rows * shape.channels;
  if (sums.a != nullptr) std::fill(sums.a, sums.a + count, 0.0);
  if (sums.b != nullptr) std::fill(sums.b, sums.b + count, 0.0);
  return true;
}

}  // namespace

void reduce(const Shape& shape, DType dtype, Input dy, Input x, const double* mean,
            const double* rstd, const Epilogue& epilogue, Sums sums) {
  if (cleared_because_empty(shape, sums, shape.samples)) return;
  const int threads = threads_for(work(shape, dtype, epilogue.activation, kBackwardStreams));
  if (one_by_one(shape, epilogue)) {
    return small_samples(shape, dtype, dy, x, mean, rstd, epilogue, sums, Output{}, Halves::reduce, threads);
  }
  const GradientJob job{shape, dtype, dy, x, mean, rstd, epilogue, sums, Output{}, Halves::reduce, threads};
  split(job);
}

void apply(const Shape& shape, DType dtype, Input dy, Input x, const double* mean,
           const double* rstd, const Epilogue& epilogue, Sums sums, Output dx) {
  if (empty(shape)) return;
  const int threads = threads_for(work(shape, dtype, epilogue.activation, kBackwardStreams));
  if (one_by_one(shape, epilogue)) {
    return small_samples(shape, dtype, dy, x, mean, rstd, epilogue, sums, dx, Halves::apply, threads);
  }
  const GradientJob job{shape, dtype, dy, x, mean, rstd, epilogue, sums, dx, Halves::apply, threads};
  split(job);
}

std::int64_t sum_rows(const Shape& shape, const Epilogue& epilogue) {
  const bool in_lanes =
      shape.layout == Layout::channels_last && samples_in_lanes(shape, epilogue);
  return in_lanes ? sum_blocks(shape) : shape.samples;
}

void backward(const Shape& shape, DType dtype, Input dy, Input x, const double* mean,
              const double* rstd, const Epilogue& epilogue, Sums sums, Output dx) {
  if (cleared_because_empty(shape, sums, sum_rows(shape, epilogue))) return;
  const Plan how = backward_plan(shape, dtype, epilogue);
  if (how.strategy == Strategy::one_by_one) {
    return small_samples(shape, dtype, dy, x, mean, rstd, epilogue, sums, dx, Halves::both, how.threads);
  }
  const GradientJob job{shape, dtype, dy, x, mean, rstd, epilogue, sums, dx, Halves::both, how.threads,
                        how.strategy == Strategy::whole_groups};
  switch (how.strategy) {
    case Strategy::one_by_one: return;  // done above, without the tables of a job
    case Strategy::samples_in_lanes: return samples_in_blocks(job);
    case Strategy::whole_groups: return rows_by_group(job);
    case Strategy::whole_samples: return columns_by_sample(job);
    case Strategy::pieces: return split(job);
  }
}

}  // namespace groupnorm
