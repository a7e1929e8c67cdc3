// The number of threads that torch has been told to use.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "parallel.h"
#include "torch_abi.h"

namespace groupnorm {

// As many threads as torch would use, for the time of a call.
class TorchThreads {
 public:
  TorchThreads() {
    std::uint32_t count = 1;
    if (torch_abi().num_threads(&count) != 0) {
      throw std::runtime_error("groupnorm: torch does not say how many threads it has");
    }
    previous_ = use_threads(static_cast<int>(count));
  }
  ~TorchThreads() { use_threads(previous_); }
  TorchThreads(const TorchThreads&) = delete;
  TorchThreads& operator=(const TorchThreads&) = delete;

 private:
  int previous_;
};

}  // namespace groupnorm
