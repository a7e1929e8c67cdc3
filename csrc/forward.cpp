// The forward drivers: cut the work, run moments and normalize, merge between them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "channel_table.h"
#include "groupnorm.h"
#include "kernels.h"
#include "parallel.h"
#include "partition.h"

namespace groupnorm {
namespace {

Moments merge(const Moments& a, const Moments& b) {
  if (a.count == 0.0) return b;
  if (b.count == 0.0) return a;
  const double count = a.count + b.count, delta = b.mean - a.mean;
  return {count, a.mean + delta * (b.count / count),
          a.m2 + b.m2 + delta * delta * (a.count * b.count / count)};
}

// Column moments of some rows of one sample: count is the same for every channel.
struct ColumnMoments {
  double count = 0.0;
  std::vector<double> mean, m2;

  explicit ColumnMoments(std::int64_t channels) : mean(index(channels)), m2(index(channels)) {}

  void merge_in(const ColumnMoments& other) {
    const double total = count + other.count;
    const double part = other.count / total, both = count * part;
    for (std::size_t c = 0; c < mean.size(); ++c) {
      const double delta = other.mean[c] - mean[c];
      mean[c] += delta * part;
      m2[c] += other.m2[c] + delta * delta * both;
    }
    count = total;
  }

  // Channels [begin, end) together.
  Moments group(std::int64_t begin, std::int64_t end) const {
    const double channels = static_cast<double>(end - begin);
    double sum = 0.0, squares = 0.0, within = 0.0;
    for (std::int64_t c = begin; c < end; ++c) sum += mean[index(c)] - mean[index(begin)];
    const double average = mean[index(begin)] + sum / channels;
    for (std::int64_t c = begin; c < end; ++c) {
      const double delta = mean[index(c)] - average;
      squares += delta * delta;
      within += m2[index(c)];
    }
    return {count * channels, average, within + count * squares};
  }
};

struct MomentsJob {
  const Shape& shape;
  DType dtype;
  Input x, residual;
  Output sum;
  const Kernels& table = kernels();

  // Channels-first: the rows of a group are one run of memory where nothing lies between them.
  Cut cut_group(std::int64_t k) const {
    const std::int64_t channels = shape.group_channels(k);
    const bool dense = x.row_stride == shape.spatial &&
                       (residual.data == nullptr || (residual.row_stride == shape.spatial &&
                                                     sum.row_stride == shape.spatial));
    return dense ? cut_rows(1, channels * shape.spatial) : cut_rows(channels, shape.spatial);
  }

  MomentsPlane plane(std::int64_t n, std::int64_t first_row, const Piece& piece) const {
    const std::int64_t row = first_row + piece.row;
    return {address(x, dtype, n, row, piece.begin),
            address(residual, dtype, n, row, piece.begin),
            address(sum, dtype, n, row, piece.begin),
            piece.rows,
            piece.length,
            x.row_stride,
            residual.row_stride,
            sum.row_stride};
  }

  Moments run(std::int64_t n, std::int64_t k, const Piece& piece) const {
    const std::int64_t first_row = shape.group_begin[index(k)];
    return table.moments_run[static_cast<int>(dtype)](plane(n, first_row, piece));
  }

  Moments group(std::int64_t n, std::int64_t k) const {
    const Cut cut = cut_group(k);
    Moments total;
    for (std::int64_t i = 0; i < cut.count(); ++i) total = merge(total, run(n, k, cut.at(i)));
    return total;
  }

  void columns(std::int64_t n, const Piece& piece, ColumnMoments& result) const {
    table.moments_columns[static_cast<int>(dtype)](plane(n, 0, piece), result.mean.data(),
                                                    result.m2.data());
    result.count = static_cast<double>(piece.rows);
  }

  void sample_from_columns(const ColumnMoments& columns, Moments* result) const {
    for (std::int64_t k = 0; k < shape.groups(); ++k) {
      result[k] = columns.group(shape.group_begin[index(k)], shape.group_begin[index(k) + 1]);
    }
  }
};

struct NormalizeJob {
  const Shape& shape;
  DType dtype;
  Input x;
  Output y;
  const Epilogue& epilogue;
  const Affine affine{shape, epilogue};
  const Kernels& table = kernels();

  void run(const ChannelScratch& scratch, std::int64_t n, const Piece& piece) const {
    const NormalizePlane plane = {address(x, dtype, n, piece.row, piece.begin),
                                  address(y, dtype, n, piece.row, piece.begin),
                                  piece.rows,
                                  piece.length,
                                  x.row_stride,
                                  y.row_stride,
                                  scratch.table(),
                                  epilogue.beta};
    table.normalize[static_cast<int>(dtype)][static_cast<int>(epilogue.activation)]
                   [static_cast<int>(shape.layout)][scratch.in_double()](plane);
  }

  // Channels [begin, end) of sample n, with statistics indexed from the sample's first group.
  void fill(ChannelScratch& scratch, std::int64_t n, std::int64_t begin, std::int64_t end,
            const double* mean, const double* rstd) const {
    scratch.fill(shape, affine, n, begin, end, mean + n * shape.groups(),
                 rstd + n * shape.groups());
  }
};

int threads_for(const Shape& shape, DType dtype) {
  return groupnorm::threads_for(total_elements(shape) * element_size(dtype));
}

// Channels-first moments with the pieces of all groups spread over threads.
void split_moments_rows(const MomentsJob& job, int threads, Moments* result) {
  struct Place {
    std::int64_t group;
    Piece piece;
  };
  const Shape& shape = job.shape;
  std::vector<Place> places;
  for (std::int64_t k = 0; k < shape.groups(); ++k) {
    const Cut cut = job.cut_group(k);
    for (std::int64_t i = 0; i < cut.count(); ++i) places.push_back({k, cut.at(i)});
  }
  const auto per_sample = static_cast<std::int64_t>(places.size());
  std::vector<Moments> partial(index(shape.samples * per_sample));
  parallel_ranges(shape.samples * per_sample, threads,
                  [&](std::int64_t begin, std::int64_t end, int) {
                    for (std::int64_t i = begin; i < end; ++i) {
                      const Place& place = places[index(i % per_sample)];
                      partial[index(i)] = job.run(i / per_sample, place.group, place.piece);
                    }
                  });
  for (std::int64_t i = 0; i < shape.samples * per_sample; ++i) {
    Moments& total = result[i / per_sample * shape.groups() + places[index(i % per_sample)].group];
    total = merge(total, partial[index(i)]);
  }
}

// Channels-last moments of one sample with its pieces spread over threads.
void split_moments_columns(const MomentsJob& job, std::int64_t n, int threads, Moments* result) {
  const Cut cut = cut_positions(job.shape);
  std::vector<ColumnMoments> partial(index(cut.count()), ColumnMoments(job.shape.channels));
  parallel_ranges(cut.count(), threads, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) job.columns(n, cut.at(i), partial[index(i)]);
  });
  for (std::size_t i = 1; i < partial.size(); ++i) partial[0].merge_in(partial[i]);
  job.sample_from_columns(partial[0], result);
}

// The same, on one thread with scratch for two sets of columns.
void moments_columns(const MomentsJob& job, std::int64_t n, ColumnMoments& total,
                     ColumnMoments& piece, Moments* result) {
  const Cut cut = cut_positions(job.shape);
  job.columns(n, cut.at(0), total);
  for (std::int64_t i = 1; i < cut.count(); ++i) {
    job.columns(n, cut.at(i), piece);
    total.merge_in(piece);
  }
  job.sample_from_columns(total, result);
}

void split_normalize(const NormalizeJob& job, std::int64_t first_sample, std::int64_t samples,
                     int threads, const double* mean, const double* rstd) {
  const Shape& shape = job.shape;
  const bool rows_are_channels = shape.layout == Layout::channels_first;
  const Cut cut = rows_are_channels ? cut_rows(shape.channels, shape.spatial)
                                    : cut_positions(shape);
  auto scratch = per_thread<ChannelScratch>(
      threads, job.dtype, rows_are_channels ? cut.row_step : shape.channels, false);
  parallel_ranges(samples * cut.count(), threads,
                  [&](std::int64_t begin, std::int64_t end, int thread) {
                    ChannelScratch& mine = scratch[index(thread)];
                    std::int64_t filled = -1;
                    for (std::int64_t i = begin; i < end; ++i) {
                      const std::int64_t n = first_sample + i / cut.count();
                      const Piece piece = cut.at(i % cut.count());
                      if (rows_are_channels) {
                        job.fill(mine, n, piece.row, piece.row + piece.rows, mean, rstd);
                      } else if (n != filled) {
                        job.fill(mine, n, 0, shape.channels, mean, rstd);
                        filled = n;
                      }
                      job.run(mine, n, piece);
                    }
                  });
}

struct Statistics {
  double eps;
  double* mean;
  double* rstd;

  void set(std::int64_t i, const Moments& m) const {
    mean[i] = m.mean;
    rstd[i] = 1.0 / std::sqrt((m.count > 0.0 ? m.m2 / m.count : 0.0) + eps);
  }
};

void forward_rows(const MomentsJob& in, const NormalizeJob& out, const Statistics& stats) {
  const Shape& shape = in.shape;
  const std::int64_t units = shape.samples * shape.groups();
  const int threads = threads_for(shape, in.dtype);
  if (shares_well(units, threads)) {
    auto scratch = per_thread<ChannelScratch>(threads, in.dtype, widest_group(shape), false);
    parallel_ranges(units, threads, [&](std::int64_t begin, std::int64_t end, int thread) {
      ChannelScratch& mine = scratch[index(thread)];
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t n = i / shape.groups(), k = i % shape.groups();
        stats.set(i, in.group(n, k));
        const std::int64_t first = shape.group_begin[index(k)], channels = shape.group_channels(k);
        out.fill(mine, n, first, first + channels, stats.mean, stats.rstd);
        out.run(mine, n, {first, channels, 0, shape.spatial});
      }
    });
    return;
  }
  std::vector<Moments> moments(index(units));
  split_moments_rows(in, threads, moments.data());
  for (std::int64_t i = 0; i < units; ++i) stats.set(i, moments[index(i)]);
  split_normalize(out, 0, shape.samples, threads, stats.mean, stats.rstd);
}

void forward_columns(const MomentsJob& in, const NormalizeJob& out, const Statistics& stats) {
  const Shape& shape = in.shape;
  const int threads = threads_for(shape, in.dtype);
  if (shares_well(shape.samples, threads)) {
    auto scratch = per_thread<ChannelScratch>(threads, in.dtype, shape.channels, false);
    auto columns = per_thread<ColumnMoments>(2 * threads, shape.channels);
    auto groups = per_thread<std::vector<Moments>>(threads, index(shape.groups()));
    const Cut cut = cut_positions(shape);
    parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int thread) {
      ChannelScratch& mine = scratch[index(thread)];
      Moments* moments = groups[index(thread)].data();
      for (std::int64_t n = begin; n < end; ++n) {
        moments_columns(in, n, columns[index(2 * thread)], columns[index(2 * thread + 1)], moments);
        for (std::int64_t k = 0; k < shape.groups(); ++k) {
          stats.set(n * shape.groups() + k, moments[k]);
        }
        out.fill(mine, n, 0, shape.channels, stats.mean, stats.rstd);
        for (std::int64_t i = 0; i < cut.count(); ++i) out.run(mine, n, cut.at(i));
      }
    });
    return;
  }
  std::vector<Moments> moments(index(shape.groups()));
  for (std::int64_t n = 0; n < shape.samples; ++n) {
    split_moments_columns(in, n, threads, moments.data());
    for (std::int64_t k = 0; k < shape.groups(); ++k) {
      stats.set(n * shape.groups() + k, moments[index(k)]);
    }
    split_normalize(out, n, 1, threads, stats.mean, stats.rstd);
  }
}

}  // namespace

void moments(const Shape& shape, DType dtype, Input x, Input residual, Output sum,
             Moments* result) {
  std::fill(result, result + shape.samples * shape.groups(), Moments{});
  if (empty(shape)) return;
  const MomentsJob job{shape, dtype, x, residual, sum};
  const int threads = threads_for(shape, dtype);
  if (shape.layout == Layout::channels_first) {
    split_moments_rows(job, threads, result);
  } else {
    for (std::int64_t n = 0; n < shape.samples; ++n) {
      split_moments_columns(job, n, threads, result + n * shape.groups());
    }
  }
}

void normalize(const Shape& shape, DType dtype, Input x, const double* mean, const double* rstd,
               const Epilogue& epilogue, Output y) {
  if (empty(shape)) return;
  const NormalizeJob job{shape, dtype, x, y, epilogue};
  split_normalize(job, 0, shape.samples, threads_for(shape, dtype), mean, rstd);
}

void forward(const Shape& shape, DType dtype, Input x, Input residual, Output sum, double eps,
             const Epilogue& epilogue, Output y, double* mean, double* rstd) {
  const Statistics stats{eps, mean, rstd};
  if (empty(shape)) {
    for (std::int64_t i = 0; i < shape.samples * shape.groups(); ++i) stats.set(i, Moments{});
    return;
  }
  const MomentsJob in{shape, dtype, x, residual, sum};
  const Input normalized = residual.data == nullptr
                               ? x
                               : Input{sum.data, sum.sample_stride, sum.row_stride};
  const NormalizeJob out{shape, dtype, normalized, y, epilogue};
  if (shape.layout == Layout::channels_first) {
    forward_rows(in, out, stats);
  } else {
    forward_columns(in, out, stats);
  }
}

}  // namespace groupnorm
