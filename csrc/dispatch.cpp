// Which instruction set runs: an ordered list, the best that this CPU has first, or the forced one.
//
// Guarantees: built for the baseline, so it runs anywhere; a forced instruction set that cannot
// run is an error, never a silent fall-back.
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>

#include "groupnorm.h"
#include "kernels.h"

namespace groupnorm {
namespace {

struct Candidate {
  const char* name;
  const Kernels& (*table)();
  const char* (*why_not)();
};

#ifdef GROUPNORM_X86
const char* why_not_avx2() {
  if (!__builtin_cpu_supports("avx2")) return "this CPU has no AVX2";
  if (!__builtin_cpu_supports("fma")) return "this CPU has no FMA";
  if (!__builtin_cpu_supports("f16c")) return "this CPU has no F16C";
  return nullptr;
}
#ifdef GROUPNORM_EMULATE_AVX512
const char* why_not_avx512() { return why_not_avx2(); }
const char* why_not_avx512_bf16() { return why_not_avx2(); }
#else
const char* why_not_avx512() {
  if (const char* reason = why_not_avx2()) return reason;
  if (!__builtin_cpu_supports("avx512f")) return "this CPU has no AVX-512";
  if (!__builtin_cpu_supports("avx512bw")) return "this CPU has no AVX512BW";
  if (!__builtin_cpu_supports("avx512dq")) return "this CPU has no AVX512DQ";
  if (!__builtin_cpu_supports("avx512vl")) return "this CPU has no AVX512VL";
  return nullptr;
}
const char* why_not_avx512_bf16() {
  if (const char* reason = why_not_avx512()) return reason;
  if (!__builtin_cpu_supports("avx512bf16")) return "this CPU has no AVX512_BF16";
  return nullptr;
}
#endif
#endif

const Candidate candidates[] = {
#ifdef GROUPNORM_X86
    {"avx512_bf16", kernels_avx512_bf16, why_not_avx512_bf16},
    {"avx512", kernels_avx512, why_not_avx512},
    {"avx2", kernels_avx2, why_not_avx2},
#endif
    {"portable", kernels_portable, [] { return static_cast<const char*>(nullptr); }},
};

constexpr std::size_t kCandidates = sizeof(candidates) / sizeof(candidates[0]);

// Entries that are null come from another table.
template <class Kernel>
void fill_in(Kernel*& entry, Kernel* other) {
  if (entry == nullptr) entry = other;
}
template <class Entry, std::size_t kCount>
void fill_in(Entry (&entries)[kCount], const Entry (&others)[kCount]) {
  for (std::size_t i = 0; i < kCount; ++i) fill_in(entries[i], others[i]);
}

void fill_in(Kernels& table, const Kernels& other) {
  fill_in(table.moments_run, other.moments_run);
  fill_in(table.moments_columns, other.moments_columns);
  fill_in(table.normalize, other.normalize);
  fill_in(table.reduce, other.reduce);
  fill_in(table.apply, other.apply);
  fill_in(table.samples_forward, other.samples_forward);
  fill_in(table.samples_backward, other.samples_backward);
  fill_in(table.apply_kept, other.apply_kept);
  fill_in(table.channel_numbers, other.channel_numbers);
  fill_in(table.gradient_numbers, other.gradient_numbers);
  fill_in(table.put_back_xhat_low, other.put_back_xhat_low);
}

// A candidate's table; what it does not build comes from the next one that does, which runs wherever the
// candidate does. To be called for a candidate that can run: even building its table is code of its
// instruction set.
const Kernels& completed_table(std::size_t index) {
  static Kernels tables[kCandidates];
  static std::once_flag once[kCandidates];
  std::call_once(once[index], [index] {
    Kernels& table = tables[index];
    table = candidates[index].table();
    for (std::size_t i = index + 1; i < kCandidates; ++i) fill_in(table, candidates[i].table());
    fill_in(table, kernels_narrow_in_double());
  });
  return tables[index];
}

std::string listed() {
  std::string names;
  for (const Candidate& candidate : candidates) {
    if (candidate.why_not() != nullptr) continue;
    if (!names.empty()) names += ", ";
    names += candidate.name;
  }
  return names;
}

const Kernels& choose(const char* forced, const char* source) {
  std::size_t index = 0;
  for (const Candidate& candidate : candidates) {
    const char* reason = candidate.why_not();
    if (forced == nullptr) {
      if (reason == nullptr) return completed_table(index);
    } else if (candidate.name == std::string(forced)) {
      if (reason == nullptr) return completed_table(index);
      throw std::invalid_argument(std::string(source) + "=" + forced + " cannot run: " + reason +
                                  "; use one of: " + listed());
    }
    ++index;
  }
  throw std::invalid_argument(std::string(source) + "=" + forced +
                              " names no instruction set of this build; use one of: " + listed());
}

std::atomic<const Kernels*> selected{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = selected.load(std::memory_order_acquire);
  if (table == nullptr) {
    const char* forced = std::getenv("GROUPNORM_ISA");
    if (forced != nullptr && *forced == '\0') forced = nullptr;
    table = &choose(forced, "GROUPNORM_ISA");
    selected.store(table, std::memory_order_release);
  }
  return *table;
}

const char* isa_selected() { return kernels().name; }

void isa_force(const char* name) {
  selected.store(name == nullptr ? nullptr : &choose(name, "isa"), std::memory_order_release);
}

std::vector<IsaStatus> isa_list() {
  std::vector<IsaStatus> result;
  for (const Candidate& candidate : candidates) {
    const char* why_not = candidate.why_not();
    const std::uint64_t calls =
        why_not == nullptr ? __atomic_load_n(candidate.table().calls, __ATOMIC_RELAXED) : 0;
    result.push_back({candidate.name, why_not, calls});
  }
  return result;
}

}  // namespace groupnorm
