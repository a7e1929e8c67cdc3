// The number of threads that torch has been told to use.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "groupnorm.h"
#include "parallel.h"
#include "partition.h"
#include "strategy.h"
#include "torch_abi.h"

namespace groupnorm {

// As many threads as torch would use, for the time of a call; torch is not asked where one will do.
class TorchThreads {
 public:
  TorchThreads(const Shape& shape, DType dtype, const Epilogue& epilogue)
      : used_(worth_a_thread(work(shape, dtype, epilogue.activation, kBackwardStreams))) {
    if (!used_) return;
    std::uint32_t count = 1;
    if (torch_abi().num_threads(&count) != 0) {
      throw std::runtime_error("groupnorm: torch does not say how many threads it has");
    }
    previous_ = use_threads(static_cast<int>(count));
  }
  ~TorchThreads() {
    if (used_) use_threads(previous_);
  }
  TorchThreads(const TorchThreads&) = delete;
  TorchThreads& operator=(const TorchThreads&) = delete;

 private:
  bool used_;
  int previous_ = 0;
};

}  // namespace groupnorm
