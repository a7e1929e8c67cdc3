// The forward drivers: cut the work, run moments and normalize, merge between them.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "buffer.h"
#include "channel_table.h"
#include "groupnorm.h"
#include "kernels.h"
#include "parallel.h"
#include "partition.h"
#include "small_samples.h"
#include "strategy.h"

namespace groupnorm {
namespace {

// The mean's two parts are never added up here: b - a is a difference of two means that may be large
// and close, plus a small one.
PieceMoments merge(const PieceMoments& a, const PieceMoments& b) {
  if (a.count == 0.0) return b;
  if (b.count == 0.0) return a;
  const double count = a.count + b.count;
  const double delta = (b.mean - a.mean) + (b.mean_low - a.mean_low);
  return {count, a.mean, a.mean_low + delta * (b.count / count),
          a.m2 + b.m2 + delta * delta * (a.count * b.count / count)};
}

// Column moments of some rows of one sample: count is the same for every channel.
struct ColumnMoments {
  double count = 0.0;
  Values mean, mean_low, m2;

  explicit ColumnMoments(std::int64_t channels)
      : mean(index(channels)), mean_low(index(channels)), m2(index(channels)) {}

  void merge_in(const ColumnMoments& other) {
    const double total = count + other.count;
    const double part = other.count / total, both = count * part;
    for (std::size_t c = 0; c < mean.size(); ++c) {
      const double delta = (other.mean[c] - mean[c]) + (other.mean_low[c] - mean_low[c]);
      mean_low[c] += delta * part;
      m2[c] += other.m2[c] + delta * delta * both;
    }
    count = total;
  }

  // Channels [begin, end) together.
  PieceMoments group(std::int64_t begin, std::int64_t end) const {
    const double channels = static_cast<double>(end - begin);
    const double base = mean[index(begin)];
    const auto from_base = [&](std::int64_t c) { return (mean[index(c)] - base) + mean_low[index(c)]; };
    // In four lanes, because one sum would wait for its last addition.
    const auto sum_of = [&](const auto& term) {
      double lanes[4] = {};
      std::int64_t c = begin;
      for (; c + 4 <= end; c += 4) {
        for (int lane = 0; lane < 4; ++lane) lanes[lane] += term(c + lane);
      }
      for (; c < end; ++c) lanes[0] += term(c);
      return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
    };
    const double average = sum_of(from_base) / channels;
    const double squares = sum_of([&](std::int64_t c) {
      const double delta = from_base(c) - average;
      return delta * delta;
    });
    const double within = sum_of([&](std::int64_t c) { return m2[index(c)]; });
    return {count * channels, base, average, within + count * squares};
  }
};

// Two passes over a few numbers.
PieceMoments few_moments(const double* values, std::int64_t length) {
  double sum = 0.0, rest = 0.0, m2 = 0.0;
  for (std::int64_t i = 0; i < length; ++i) sum += values[i];
  const double count = static_cast<double>(length), mean = sum / count;
  for (std::int64_t i = 0; i < length; ++i) {
    const double d = values[i] - mean;
    rest += d;
    m2 += d * d;
  }
  const double exact = m2 - rest * (rest / count);
  // A NaN stays one.
  return {count, mean, rest / count, exact < 0.0 ? 0.0 : exact};
}

using GroupMoments = Buffer<PieceMoments, 32>;

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
            sum.row_stride,
            far(shape, dtype, residual.data == nullptr ? 1 : 3)};
  }

  PieceMoments run(std::int64_t n, std::int64_t k, const Piece& piece) const {
    return run(plane(n, shape.group_begin[index(k)], piece));
  }
  // A few numbers, one by one, cost less than a kernel's sixteen lanes.
  PieceMoments run(const MomentsPlane& numbers) const {
    constexpr std::int64_t kFew = 32;
    const std::int64_t count = numbers.length;
    if (numbers.rows != 1 || count > kFew) return table.moments_run[static_cast<int>(dtype)](numbers);
    double values[kFew], added[kFew];
    load_values(numbers.x, dtype, 1, count, values);
    if (numbers.residual != nullptr) {
      load_values(numbers.residual, dtype, 1, count, added);
      for (std::int64_t i = 0; i < count; ++i) values[i] += added[i];
      store_values(numbers.sum, dtype, 1, count, values);
      load_values(numbers.sum, dtype, 1, count, values);
    }
    return few_moments(values, count);
  }

  // One position: a group is a run of a few adjacent channels, whose columns would all be constant.
  PieceMoments adjacent_channels(std::int64_t n, std::int64_t k) const {
    return run(plane(n, 0, {0, 1, shape.group_begin[index(k)], shape.group_channels(k)}));
  }

  // A group of a small sample, its numbers one by one.
  PieceMoments small_group(std::int64_t n, std::int64_t k) const {
    double values[kSmallSample], added[kSmallSample];
    std::int64_t count = 0;
    for (std::int64_t c = shape.group_begin[index(k)]; c < shape.group_begin[index(k) + 1]; ++c) {
      double* const channel = values + count;
      load_channel(x, shape, dtype, n, c, channel);
      count += shape.spatial;
      if (residual.data == nullptr) continue;
      load_channel(residual, shape, dtype, n, c, added);
      for (std::int64_t i = 0; i < shape.spatial; ++i) channel[i] += added[i];
      store_channel(sum, shape, dtype, n, c, channel);
      load_channel(sum, shape, dtype, n, c, channel);
    }
    return few_moments(values, count);
  }

  PieceMoments group(std::int64_t n, std::int64_t k) const {
    if (is_small_sample(shape)) return small_group(n, k);
    const Cut cut = cut_group(k);
    PieceMoments total;
    for (std::int64_t i = 0; i < cut.count(); ++i) total = merge(total, run(n, k, cut.at(i)));
    return total;
  }

  void columns(std::int64_t n, const Piece& piece, ColumnMoments& result) const {
    table.moments_columns[static_cast<int>(dtype)](plane(n, 0, piece), result.mean.data(),
                                                    result.mean_low.data(), result.m2.data());
    result.count = static_cast<double>(piece.rows);
  }

  void groups_from_columns(const ColumnMoments& columns, PieceMoments* result) const {
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
  int threads;
  const Affines affines{shape, dtype, epilogue, threads};
  const Kernels& table = kernels();

  void run(const ChannelScratch& scratch, std::int64_t n, const Piece& piece) const {
    scratch.for_each_run([&](std::int64_t first, std::int64_t count, const ChannelTable& channels,
                             int in_double) {
      const Piece part = channels_of(piece, shape.layout, first, count);
      const NormalizePlane plane = {address(x, dtype, n, part.row, part.begin),
                                    address(y, dtype, n, part.row, part.begin),
                                    part.rows,
                                    part.length,
                                    x.row_stride,
                                    y.row_stride,
                                    channels,
                                    epilogue.beta,
                                    far(shape, dtype, 2),
                                    leaves_caches(shape, dtype, epilogue.activation)};
      table.normalize[static_cast<int>(dtype)][static_cast<int>(epilogue.activation)]
                     [static_cast<int>(shape.layout)][in_double](plane);
    });
  }
};

// Where the statistics of all groups are kept, [N, G]: the mean in two parts.
struct Statistics {
  std::int64_t groups;
  const double *mean, *mean_low, *rstd;

  SampleStatistics sample(std::int64_t n) const {
    const std::int64_t first = n * groups;
    return {mean + first, mean_low == nullptr ? nullptr : mean_low + first, rstd + first};
  }
};

struct StatisticsWriter {
  double eps;
  double *mean, *mean_low, *rstd;

  void set(std::int64_t i, const PieceMoments& m) const {
    mean[i] = m.mean + m.mean_low;
    // What the sum lost; exact, because the first part is not smaller or both are of one size.
    const double back = mean[i] - m.mean;
    const double lost = (m.mean - (mean[i] - back)) + (m.mean_low - back);
    mean_low[i] = std::isfinite(lost) ? lost : 0.0;
    const double variance = m.count > 0.0 ? m.m2 / m.count : 0.0;
    // Squares that overflow must not turn into zeros.
    rstd[i] = std::isinf(variance) ? std::numeric_limits<double>::quiet_NaN()
                                   : 1.0 / std::sqrt(variance + eps);
  }
};

// Channels-first moments with the pieces of all groups spread over threads.
void split_moments_rows(const MomentsJob& job, int threads, PieceMoments* result) {
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
  GroupMoments partial(index(shape.samples * per_sample));
  parallel_ranges(shape.samples * per_sample, threads,
                  [&](std::int64_t begin, std::int64_t end, int) {
                    for (std::int64_t i = begin; i < end; ++i) {
                      const Place& place = places[index(i % per_sample)];
                      partial[index(i)] = job.run(i / per_sample, place.group, place.piece);
                    }
                  });
  for (std::int64_t i = 0; i < shape.samples * per_sample; ++i) {
    PieceMoments& total = result[i / per_sample * shape.groups() + places[index(i % per_sample)].group];
    total = merge(total, partial[index(i)]);
  }
}

// Channels-last moments of one sample with its pieces spread over threads.
void split_moments_columns(const MomentsJob& job, std::int64_t n, int threads,
                           PieceMoments* result) {
  if (job.shape.spatial == 1) {
    parallel_ranges(job.shape.groups(), threads, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t k = begin; k < end; ++k) result[k] = job.adjacent_channels(n, k);
    });
    return;
  }
  const Cut cut = cut_positions(job.shape);
  Several<ColumnMoments> partial(index(cut.count()), job.shape.channels);
  parallel_ranges(cut.count(), threads, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) job.columns(n, cut.at(i), partial[index(i)]);
  });
  for (std::size_t i = 1; i < partial.size(); ++i) partial[0].merge_in(partial[i]);
  job.groups_from_columns(partial[0], result);
}

// The same, on one thread with scratch for two sets of columns.
void moments_columns(const MomentsJob& job, std::int64_t n, ColumnMoments& total,
                     ColumnMoments& piece, PieceMoments* result) {
  if (job.shape.spatial == 1 || is_small_sample(job.shape)) {
    for (std::int64_t k = 0; k < job.shape.groups(); ++k) {
      result[k] = job.shape.spatial == 1 ? job.adjacent_channels(n, k) : job.small_group(n, k);
    }
    return;
  }
  const Cut cut = cut_positions(job.shape);
  job.columns(n, cut.at(0), total);
  for (std::int64_t i = 1; i < cut.count(); ++i) {
    job.columns(n, cut.at(i), piece);
    total.merge_in(piece);
  }
  job.groups_from_columns(total, result);
}

void split_normalize_rows(const NormalizeJob& job, const Statistics& stats) {
  const Shape& shape = job.shape;
  const int threads = job.threads;
  const Cut cut = cut_rows(shape.channels, shape.spatial);
  PerThread<ChannelScratch> scratch(index(threads), job.dtype, job.epilogue, cut.row_step, false);
  parallel_ranges(shape.samples * cut.count(), threads,
                  [&](std::int64_t begin, std::int64_t end, int thread) {
                    for (std::int64_t i = begin; i < end; ++i) {
                      const std::int64_t n = i / cut.count();
                      const Piece piece = cut.at(i % cut.count());
                      scratch[index(thread)].fill(shape, job.affines.of(thread), n, piece.row,
                                                  piece.row + piece.rows, stats.sample(n));
                      job.run(scratch[index(thread)], n, piece);
                    }
                  });
}

void split_normalize_columns(const NormalizeJob& job, std::int64_t n, const Statistics& stats) {
  const Shape& shape = job.shape;
  const int threads = job.threads;
  const Cut cut = cut_positions(shape);
  PerThread<ChannelScratch> scratch(index(threads), job.dtype, job.epilogue, shape.channels, false);
  std::vector<char> filled(index(threads));
  // From the end, where the rows that moments have read last are still in cache.
  const std::int64_t pieces = cut.count();
  parallel_ranges(pieces, threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    ChannelScratch& mine = scratch[index(thread)];
    if (filled[index(thread)] == 0) {
      mine.fill(shape, job.affines.of(thread), n, 0, shape.channels, stats.sample(n));
    }
    filled[index(thread)] = 1;
    for (std::int64_t i = begin; i < end; ++i) {
      job.run(mine, n, cut.at(from_share_end(i, pieces, threads)));
    }
  });
}

[[gnu::noinline]] void forward_rows(const MomentsJob& in, const NormalizeJob& out, const StatisticsWriter& write,
                                    const Statistics& stats, const Plan& how) {
  const Shape& shape = in.shape;
  const std::int64_t units = shape.samples * shape.groups();
  const int threads = how.threads;
  if (how.strategy == Strategy::whole_groups) {
    const GroupBatches batches(shape, threads);
    PerThread<ChannelScratch> scratch(index(threads), in.dtype, out.epilogue,
                                    batches.most_channels(shape), false);
    PerThread<GroupMoments> moments(index(threads), index(batches.per_batch));
    parallel_ranges(shape.samples * batches.per_sample, threads,
                    [&](std::int64_t begin, std::int64_t end, int thread) {
                      ChannelScratch& mine = scratch[index(thread)];
                      for (std::int64_t i = begin; i < end; ++i) {
                        const auto batch = batches.at(shape, i);
                        const std::int64_t n = batch.sample, first = batch.first_channel;
                        // Apart, so that the roots of one group do not wait for the sums of the next.
                        PieceMoments* mine_moments = moments[index(thread)].data();
                        for (std::int64_t k = batch.first_group; k < batch.end_group; ++k) {
                          mine_moments[k - batch.first_group] = in.group(n, k);
                        }
                        for (std::int64_t k = batch.first_group; k < batch.end_group; ++k) {
                          write.set(n * shape.groups() + k, mine_moments[k - batch.first_group]);
                        }
                        mine.fill(shape, out.affines.of(thread), n, first, batch.end_channel,
                                  stats.sample(n));
                        out.run(mine, n, {first, batch.end_channel - first, 0, shape.spatial});
                      }
                    });
    return;
  }
  GroupMoments moments(index(units));
  split_moments_rows(in, threads, moments.data());
  for (std::int64_t i = 0; i < units; ++i) write.set(i, moments[index(i)]);
  split_normalize_rows(out, stats);
}

void forward_samples(const MomentsJob& in, const NormalizeJob& out, double eps, double* mean,
                     double* rstd, int threads) {
  const Shape& shape = in.shape;
  parallel_ranges(sample_blocks(shape), threads,
                  [&](std::int64_t begin, std::int64_t end, int thread) {
                    const Affine& affine = out.affines.of(thread);
                    const std::int64_t n = begin * kLaneSamples, first = n * shape.groups();
                    const SamplesPlane plane = {address(in.x, in.dtype, n, 0, 0),
                                                nullptr,
                                                address(out.y, in.dtype, n, 0, 0),
                                                in.x.sample_stride,
                                                0,
                                                out.y.sample_stride,
                                                std::min(end * kLaneSamples, shape.samples) - n,
                                                shape.channels,
                                                shape.groups(),
                                                equal_group_size(shape),
                                                shape.group_begin.data(),
                                                affine.gains(),
                                                affine.offsets(),
                                                eps,
                                                out.epilogue.beta,
                                                mean + first,
                                                rstd + first,
                                                nullptr,
                                                nullptr,
                                                false};
                    in.table.samples_forward[static_cast<int>(in.dtype)]
                                            [static_cast<int>(out.epilogue.activation)](plane);
                  });
}

[[gnu::noinline]] void forward_columns(const MomentsJob& in, const NormalizeJob& out, const StatisticsWriter& write,
                                       const Statistics& stats, const Plan& how) {
  const Shape& shape = in.shape;
  const int threads = how.threads;
  const auto write_sample = [&](std::int64_t n, const PieceMoments* moments) {
    for (std::int64_t k = 0; k < shape.groups(); ++k) write.set(n * shape.groups() + k, moments[k]);
  };
  if (how.strategy == Strategy::pieces) {
    GroupMoments moments(index(shape.groups()));
    for (std::int64_t n = 0; n < shape.samples; ++n) {
      split_moments_columns(in, n, threads, moments.data());
      write_sample(n, moments.data());
      split_normalize_columns(out, n, stats);
    }
    return;
  }
  PerThread<ChannelScratch> scratch(index(threads), in.dtype, out.epilogue, shape.channels, false);
  PerThread<ColumnMoments> totals(index(threads), shape.channels);
  PerThread<ColumnMoments> pieces(index(threads), shape.channels);
  PerThread<GroupMoments> groups(index(threads), index(shape.groups()));
  const Cut cut = cut_positions(shape);
  parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int thread) {
    ChannelScratch& mine = scratch[index(thread)];
    PieceMoments* moments = groups[index(thread)].data();
    for (std::int64_t n = begin; n < end; ++n) {
      moments_columns(in, n, totals[index(thread)], pieces[index(thread)], moments);
      write_sample(n, moments);
      mine.fill(shape, out.affines.of(thread), n, 0, shape.channels, stats.sample(n));
      for (std::int64_t i = cut.count() - 1; i >= 0; --i) out.run(mine, n, cut.at(i));
    }
  });
}

// The y of one small sample.
void normalize_small(const Shape& shape, DType dtype, const Input& x, const Epilogue& epilogue, const Output& y,
                     std::int64_t n, const SampleStatistics& stats) {
  double values[kSmallSample];
  for (std::int64_t k = 0; k < shape.groups(); ++k) {
    const double mean = stats.mean[k], mean_low = stats.mean_low == nullptr ? 0.0 : stats.mean_low[k];
    for (std::int64_t c = shape.group_begin[index(k)]; c < shape.group_begin[index(k) + 1]; ++c) {
      const double multiplier = parameter_or(epilogue.weight, c, 1.0) * stats.rstd[k];
      const double offset = parameter_or(epilogue.bias, c, 0.0);
      load_channel(x, shape, dtype, n, c, values);
      for (std::int64_t i = 0; i < shape.spatial; ++i) {
        values[i] = ((values[i] - mean) - mean_low) * multiplier + offset;
      }
      store_channel(y, shape, dtype, n, c, values);
    }
  }
}

void forward_small(const MomentsJob& in, const Input& normalized, const Epilogue& epilogue, const Output& y,
                   const StatisticsWriter& write, const Statistics& stats, int threads) {
  const Shape& shape = in.shape;
  parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t n = begin; n < end; ++n) {
      for (std::int64_t k = 0; k < shape.groups(); ++k) write.set(n * shape.groups() + k, in.small_group(n, k));
      normalize_small(shape, in.dtype, normalized, epilogue, y, n, stats.sample(n));
    }
  });
}

}  // namespace

void moments(const Shape& shape, DType dtype, Input x, Input residual, Output sum,
             Moments* result) {
  const std::int64_t units = shape.samples * shape.groups();
  std::fill(result, result + units, Moments{});
  if (empty(shape)) return;
  const MomentsJob job{shape, dtype, x, residual, sum};
  const int threads = threads_for(work(shape, dtype, Activation::none, 1));
  GroupMoments groups(index(units));
  if (is_small_sample(shape)) {
    parallel_ranges(units, threads, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t i = begin; i < end; ++i) {
        groups[index(i)] = job.small_group(i / shape.groups(), i % shape.groups());
      }
    });
  } else if (shape.layout == Layout::channels_first) {
    split_moments_rows(job, threads, groups.data());
  } else {
    for (std::int64_t n = 0; n < shape.samples; ++n) {
      split_moments_columns(job, n, threads, groups.data() + n * shape.groups());
    }
  }
  for (std::int64_t i = 0; i < units; ++i) {
    const PieceMoments& m = groups[index(i)];
    result[i] = {m.count, m.mean + m.mean_low, m.m2};
  }
}

void normalize(const Shape& shape, DType dtype, Input x, const double* mean, const double* rstd,
               const Epilogue& epilogue, Output y) {
  if (empty(shape)) return;
  const int threads = threads_for(work(shape, dtype, epilogue.activation, 1));
  const Statistics stats{shape.groups(), mean, nullptr, rstd};
  if (one_by_one(shape, epilogue)) {
    refuse_unknown_isa();
    return parallel_ranges(shape.samples, threads, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t n = begin; n < end; ++n) {
        normalize_small(shape, dtype, x, epilogue, y, n, stats.sample(n));
      }
    });
  }
  const NormalizeJob job{shape, dtype, x, y, epilogue, threads};
  if (shape.layout == Layout::channels_first) {
    split_normalize_rows(job, stats);
    return;
  }
  for (std::int64_t n = 0; n < shape.samples; ++n) {
    split_normalize_columns(job, n, stats);
  }
}

void forward(const Shape& shape, DType dtype, Input x, Input residual, Output sum, double eps,
             const Epilogue& epilogue, Output y, double* mean, double* rstd) {
  const std::int64_t units = shape.samples * shape.groups();
  // Unwritten: whoever reads a group's has set it.
  Values mean_low(index(units));
  const StatisticsWriter write{eps, mean, mean_low.data(), rstd};
  if (empty(shape)) {
    for (std::int64_t i = 0; i < units; ++i) write.set(i, PieceMoments{});
    return;
  }
  const MomentsJob in{shape, dtype, x, residual, sum};
  const Input normalized = residual.data == nullptr
                               ? x
                               : Input{sum.data, sum.sample_stride, sum.row_stride};
  const Plan how = forward_plan(shape, dtype, epilogue);
  const Statistics stats{shape.groups(), mean, mean_low.data(), rstd};
  if (how.strategy == Strategy::one_by_one) {
    return forward_small(in, normalized, epilogue, y, write, stats, how.threads);
  }
  const NormalizeJob out{shape, dtype, normalized, y, epilogue, how.threads};
  if (shape.layout == Layout::channels_first) {
    forward_rows(in, out, write, stats, how);
  } else if (how.strategy == Strategy::samples_in_lanes) {
    if (residual.data != nullptr) {
      // The moments' kernel writes the sum.
      parallel_ranges(shape.samples, how.threads, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t n = begin; n < end; ++n) {
          in.table.moments_run[static_cast<int>(dtype)](in.plane(n, 0, {0, 1, 0, shape.channels}));
        }
      });
    }
    forward_samples({shape, dtype, normalized, {}, {}}, out, eps, mean, rstd, how.threads);
  } else {
    forward_columns(in, out, write, stats, how);
  }
}

}  // namespace groupnorm
