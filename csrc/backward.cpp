// The backward drivers: cut the work, run reduce and apply, and the small sums between them.
#include <algorithm>
#include <vector>

#include "channel_table.h"
#include "groupnorm.h"
#include "kernels.h"
#include "parallel.h"
#include "partition.h"

namespace groupnorm {
namespace {

struct GradientJob {
  const Shape& shape;
  DType dtype;
  Input dy, x;
  const double* mean;
  const double* rstd;
  const Epilogue& epilogue;
  Sums sums;
  Output dx;
  const Affine affine{shape, epilogue};
  const Kernels& table = kernels();

  bool rows_are_channels() const { return shape.layout == Layout::channels_first; }

  void fill(ChannelScratch& scratch, std::int64_t n, std::int64_t begin, std::int64_t end,
            const GradientMeans* means) const {
    const std::int64_t first = n * shape.groups();
    scratch.fill(shape, affine, n, begin, end, {mean + first, nullptr, rstd + first}, means);
  }

  // Raw sums of one piece, dv and dv * (x - mean), per channel of the piece.
  void reduce(const ChannelScratch& scratch, std::int64_t n, const Piece& piece, double* a,
              double* b) const {
    scratch.for_each_run(shape.layout, [&](std::int64_t first, std::int64_t count,
                                           const ChannelTable& channels, int in_double) {
      const std::int64_t row = piece.row + (rows_are_channels() ? first : 0);
      const ReducePlane plane = {address(dy, dtype, n, row, piece.begin),
                                 address(x, dtype, n, row, piece.begin),
                                 rows_are_channels() ? count : piece.rows,
                                 piece.length,
                                 dy.row_stride,
                                 x.row_stride,
                                 channels,
                                 epilogue.beta,
                                 a + first,
                                 sums.b == nullptr ? nullptr : b + first};
      table.reduce[static_cast<int>(dtype)][static_cast<int>(epilogue.activation)]
                  [static_cast<int>(shape.layout)][in_double](plane);
    });
  }

  void apply(const ChannelScratch& scratch, std::int64_t n, const Piece& piece) const {
    scratch.for_each_run(shape.layout, [&](std::int64_t first, std::int64_t count,
                                           const ChannelTable& channels, int in_double) {
      const std::int64_t row = piece.row + (rows_are_channels() ? first : 0);
      const ApplyPlane plane = {address(dy, dtype, n, row, piece.begin),
                                address(x, dtype, n, row, piece.begin),
                                address(dx, dtype, n, row, piece.begin),
                                rows_are_channels() ? count : piece.rows,
                                piece.length,
                                dy.row_stride,
                                x.row_stride,
                                dx.row_stride,
                                channels,
                                epilogue.beta};
      table.apply[static_cast<int>(dtype)][static_cast<int>(epilogue.activation)]
                 [static_cast<int>(shape.layout)][in_double](plane);
    });
  }

  // The [N, C] sums of channels [begin, end) of sample n start at zero ...
  void clear_sums(std::int64_t n, std::int64_t begin, std::int64_t end) const {
    const std::int64_t first = n * shape.channels;
    std::fill(sums.a + first + begin, sums.a + first + end, 0.0);
    if (sums.b != nullptr) std::fill(sums.b + first + begin, sums.b + first + end, 0.0);
  }
  // ... grow by the raw sums of pieces in their order ...
  void add_sums(std::int64_t n, std::int64_t begin, std::int64_t end, const double* a,
                const double* b) const {
    const std::int64_t first = n * shape.channels + begin;
    for (std::int64_t i = 0; i < end - begin; ++i) {
      sums.a[first + i] += a[i];
      if (sums.b != nullptr) sums.b[first + i] += b[i];
    }
  }
  // ... and the second one turns from x - mean to xhat at the end.
  void finish_sums(std::int64_t n) const {
    for (std::int64_t k = 0; k < shape.groups(); ++k) finish_sums(n, k);
  }
  void finish_sums(std::int64_t n, std::int64_t k) const {
    if (sums.b == nullptr) return;
    const double r = rstd[n * shape.groups() + k];
    double* b = sums.b + n * shape.channels;
    for (std::int64_t c = shape.group_begin[index(k)]; c < shape.group_begin[index(k) + 1]; ++c) {
      b[c] *= r;
    }
  }

  GradientMeans means(std::int64_t n, std::int64_t k) const {
    const double* a = sums.a + n * shape.channels;
    const double* b = sums.b + n * shape.channels;
    const double elements =
        static_cast<double>(shape.group_channels(k)) * static_cast<double>(shape.spatial);
    GradientMeans total;
    for (std::int64_t c = shape.group_begin[index(k)]; c < shape.group_begin[index(k) + 1]; ++c) {
      const double gain = affine.gain(n, c);
      total.p += gain * a[c];
      total.q += gain * b[c];
    }
    return {total.p / elements, total.q / elements};
  }

  void means(std::int64_t n, std::vector<GradientMeans>& result) const {
    for (std::int64_t k = 0; k < shape.groups(); ++k) result[index(k)] = means(n, k);
  }

  int threads() const { return threads_for(2 * total_elements(shape) * element_size(dtype)); }
};

// A thread's own memory: coefficients, the raw sums of a piece, and a sample's mean terms.
struct Workspace {
  ChannelScratch scratch;
  std::vector<double> a, b;
  std::vector<GradientMeans> means;

  Workspace(const GradientJob& job, std::int64_t channels)
      : scratch(job.dtype, job.epilogue, channels, true),
        a(index(channels)),
        b(index(channels)),
        means(index(job.shape.groups())) {}
};

// Whole groups, one after the other: reduce, then apply while the group is in cache.
void rows_by_group(const GradientJob& job, int threads) {
  const Shape& shape = job.shape;
  auto workspaces = per_thread<Workspace>(threads, job, widest_group(shape));
  parallel_ranges(
      shape.samples * shape.groups(), threads,
      [&](std::int64_t begin, std::int64_t end, int thread) {
        Workspace& mine = workspaces[index(thread)];
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t n = i / shape.groups(), k = i % shape.groups();
          const std::int64_t first = shape.group_begin[index(k)];
          const std::int64_t channels = shape.group_channels(k);
          job.fill(mine.scratch, n, first, first + channels, nullptr);
          job.clear_sums(n, first, first + channels);
          const Cut cut = cut_rows(1, shape.spatial);
          for (std::int64_t p = 0; p < cut.count(); ++p) {
            const Piece part = cut.at(p);
            job.reduce(mine.scratch, n, {first, channels, part.begin, part.length}, mine.a.data(),
                       mine.b.data());
            job.add_sums(n, first, first + channels, mine.a.data(), mine.b.data());
          }
          job.finish_sums(n, k);
          if (job.dx.data == nullptr) continue;
          mine.means[index(k)] = job.means(n, k);
          job.fill(mine.scratch, n, first, first + channels, mine.means.data());
          job.apply(mine.scratch, n, {first, channels, 0, shape.spatial});
        }
      });
}

// Whole samples, one after the other.
void columns_by_sample(const GradientJob& job, int threads) {
  const Shape& shape = job.shape;
  auto workspaces = per_thread<Workspace>(threads, job, shape.channels);
  const Cut cut = cut_positions(shape);
  parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    Workspace& mine = workspaces[index(thread)];
    for (std::int64_t n = begin; n < end; ++n) {
      job.fill(mine.scratch, n, 0, shape.channels, nullptr);
      job.clear_sums(n, 0, shape.channels);
      for (std::int64_t i = 0; i < cut.count(); ++i) {
        job.reduce(mine.scratch, n, cut.at(i), mine.a.data(), mine.b.data());
        job.add_sums(n, 0, shape.channels, mine.a.data(), mine.b.data());
      }
      job.finish_sums(n);
      if (job.dx.data == nullptr) continue;
      job.means(n, mine.means);
      job.fill(mine.scratch, n, 0, shape.channels, mine.means.data());
      for (std::int64_t i = 0; i < cut.count(); ++i) job.apply(mine.scratch, n, cut.at(i));
    }
  });
}

// The pieces of one sample over all threads.
Cut sample_cut(const GradientJob& job) {
  return job.rows_are_channels() ? cut_rows(job.shape.channels, job.shape.spatial)
                                 : cut_positions(job.shape);
}

// Channels that a piece of the sample covers.
std::int64_t first_channel(const GradientJob& job, const Piece& piece) {
  return job.rows_are_channels() ? piece.row : 0;
}
std::int64_t channel_count(const GradientJob& job, const Piece& piece) {
  return job.rows_are_channels() ? piece.rows : job.shape.channels;
}

// The most channels that any piece covers.
std::int64_t channel_capacity(const GradientJob& job, const Cut& cut) {
  return job.rows_are_channels() ? cut.row_step : job.shape.channels;
}

void split_reduce(const GradientJob& job, std::int64_t n, int threads,
                  std::vector<Workspace>& workspaces) {
  const Cut cut = sample_cut(job);
  const std::int64_t widest = channel_capacity(job, cut);
  std::vector<double> partial(index(2 * widest * cut.count()));
  const auto sums_of = [&](std::int64_t i) { return partial.data() + 2 * widest * i; };
  parallel_ranges(cut.count(), threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    ChannelScratch& scratch = workspaces[index(thread)].scratch;
    for (std::int64_t i = begin; i < end; ++i) {
      const Piece piece = cut.at(i);
      const std::int64_t first = first_channel(job, piece);
      if (job.rows_are_channels() || i == begin) {
        job.fill(scratch, n, first, first + channel_count(job, piece), nullptr);
      }
      job.reduce(scratch, n, piece, sums_of(i), sums_of(i) + widest);
    }
  });
  job.clear_sums(n, 0, job.shape.channels);
  for (std::int64_t i = 0; i < cut.count(); ++i) {
    const Piece piece = cut.at(i);
    const std::int64_t first = first_channel(job, piece);
    job.add_sums(n, first, first + channel_count(job, piece), sums_of(i), sums_of(i) + widest);
  }
  job.finish_sums(n);
}

void split_apply(const GradientJob& job, std::int64_t n, int threads,
                 std::vector<Workspace>& workspaces, std::vector<GradientMeans>& means) {
  job.means(n, means);
  const Cut cut = sample_cut(job);
  parallel_ranges(cut.count(), threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    ChannelScratch& scratch = workspaces[index(thread)].scratch;
    for (std::int64_t i = begin; i < end; ++i) {
      const Piece piece = cut.at(i);
      const std::int64_t first = first_channel(job, piece);
      if (job.rows_are_channels() || i == begin) {
        job.fill(scratch, n, first, first + channel_count(job, piece), means.data());
      }
      job.apply(scratch, n, piece);
    }
  });
}

enum class Halves { reduce, apply, both };

void split(const GradientJob& job, int threads, Halves halves) {
  const Cut cut = sample_cut(job);
  auto workspaces = per_thread<Workspace>(threads, job, channel_capacity(job, cut));
  std::vector<GradientMeans> means(index(job.shape.groups()));
  for (std::int64_t n = 0; n < job.shape.samples; ++n) {
    if (halves != Halves::apply) split_reduce(job, n, threads, workspaces);
    if (halves != Halves::reduce && job.dx.data != nullptr) {
      split_apply(job, n, threads, workspaces, means);
    }
  }
}

bool cleared_because_empty(const Shape& shape, Sums sums) {
  if (!empty(shape)) return false;
  const std::int64_t count = shape.samples * shape.channels;
  if (sums.a != nullptr) std::fill(sums.a, sums.a + count, 0.0);
  if (sums.b != nullptr) std::fill(sums.b, sums.b + count, 0.0);
  return true;
}

}  // namespace

void reduce(const Shape& shape, DType dtype, Input dy, Input x, const double* mean,
            const double* rstd, const Epilogue& epilogue, Sums sums) {
  if (cleared_because_empty(shape, sums)) return;
  const GradientJob job{shape, dtype, dy, x, mean, rstd, epilogue, sums, Output{}};
  split(job, job.threads(), Halves::reduce);
}

void apply(const Shape& shape, DType dtype, Input dy, Input x, const double* mean,
           const double* rstd, const Epilogue& epilogue, Sums sums, Output dx) {
  if (empty(shape)) return;
  const GradientJob job{shape, dtype, dy, x, mean, rstd, epilogue, sums, dx};
  split(job, job.threads(), Halves::apply);
}

void backward(const Shape& shape, DType dtype, Input dy, Input x, const double* mean,
              const double* rstd, const Epilogue& epilogue, Sums sums, Output dx) {
  if (cleared_because_empty(shape, sums)) return;
  const GradientJob job{shape, dtype, dy, x, mean, rstd, epilogue, sums, dx};
  const int threads = job.threads();
  const bool rows = job.rows_are_channels();
  const std::int64_t units = rows ? shape.samples * shape.groups() : shape.samples;
  if (!shares_well(units, threads)) {
    split(job, threads, Halves::both);
  } else if (rows) {
    rows_by_group(job, threads);
  } else {
    columns_by_sample(job, threads);
  }
}

void parameter_gradients(const Shape& shape, const Epilogue& epilogue, Sums sums,
                         ParameterGradients out) {
  const Affine affine(shape, epilogue);
  const std::int64_t channels = shape.channels;
  std::vector<double> weight(index(out.weight == nullptr ? 0 : channels));
  std::vector<double> bias(index(out.bias == nullptr ? 0 : channels));
  for (std::int64_t n = 0; n < shape.samples; ++n) {
    const double* a = sums.a + n * channels;
    const double* b = sums.b == nullptr ? nullptr : sums.b + n * channels;
    for (std::int64_t c = 0; c < channels; ++c) {
      const double factor = affine.one_plus_scale(n, c);
      if (out.bias != nullptr) bias[index(c)] += factor * a[c];
      if (out.weight != nullptr) weight[index(c)] += factor * b[c];
    }
    if (out.shift == nullptr && out.scale == nullptr) continue;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::int64_t i = n * channels + c;
      if (out.shift != nullptr) store_parameter(out.shift, epilogue.shift.dtype, i, a[c]);
      if (out.scale != nullptr) {
        store_parameter(out.scale, epilogue.scale.dtype, i,
                        affine.weight(c) * b[c] + affine.bias(c) * a[c]);
      }
    }
  }
  for (std::int64_t c = 0; c < channels; ++c) {
    if (out.weight != nullptr) {
      store_parameter(out.weight, epilogue.weight.dtype, c, weight[index(c)]);
    }
    if (out.bias != nullptr) store_parameter(out.bias, epilogue.bias.dtype, c, bias[index(c)]);
  }
}

}  // namespace groupnorm
