// Memory for one call, on the stack where little is needed: on a small tensor, asking the heap for twenty
// arrays costs as much as the work. What is more comes from scratch.h.
//
// Guarantees: addresses stay what they are as long as the owner lives, since nothing here can be copied,
// moved or resized.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "scratch.h"

namespace groupnorm {

// So many T, as unwritten as T allows; in place up to kInPlace of them.
template <class T, std::size_t kInPlace>
class Buffer {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  explicit Buffer(std::size_t count)
      : count_(count), data_(count <= kInPlace ? in_place_ : from_scratch(count)) {}
  Buffer(std::size_t count, T value) : Buffer(count) { std::fill(begin(), end(), value); }
  ~Buffer() {
    if (data_ != in_place_) release_scratch(data_, count_ * sizeof(T));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::size_t size() const { return count_; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  const T* begin() const { return data_; }
  T* end() { return data_ + count_; }
  const T* end() const { return data_ + count_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }

 private:
  static T* from_scratch(std::size_t count) {
    if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) throw std::bad_alloc();
    T* const data = static_cast<T*>(acquire_scratch(count * sizeof(T)));
    std::uninitialized_default_construct_n(data, count);
    return data;
  }

  std::size_t count_;
  T* data_;
  T in_place_[kInPlace];
};

// One for each channel, or for each group of a sample or of all.
using Values = Buffer<double, 64>;

// So many T, all made from the same arguments; a single one in place.
template <class T>
class Several {
 public:
  template <class... Arguments>
  explicit Several(std::size_t count, const Arguments&... arguments)
      : count_(count),
        data_(count <= 1 ? reinterpret_cast<T*>(in_place_)
                         : static_cast<T*>(acquire_scratch(count * sizeof(T)))) {
    try {
      for (; made_ < count; ++made_) new (data_ + made_) T(arguments...);
    } catch (...) {
      release();
      throw;
    }
  }
  ~Several() { release(); }
  Several(const Several&) = delete;
  Several& operator=(const Several&) = delete;

  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  void release() {
    for (std::size_t i = made_; i > 0; --i) data_[i - 1].~T();
    if (data_ != reinterpret_cast<T*>(in_place_)) release_scratch(data_, count_ * sizeof(T));
  }

  std::size_t count_, made_ = 0;
  T* data_;
  alignas(T) unsigned char in_place_[sizeof(T)];
};

// A T for each thread, all made from the same arguments, each with its memory in that thread's lane (scratch.h).
template <class T>
class PerThread {
 public:
  template <class... Arguments>
  explicit PerThread(std::size_t threads, const Arguments&... arguments) : elements_(threads) {
    // The first lane is where everything is that names no other.
    new (first()) T(arguments...);
    elements_[made_++] = first();
    try {
      for (; made_ < threads; ++made_) make_in_lane(arguments...);
    } catch (...) {
      release();
      throw;
    }
  }
  ~PerThread() { release(); }
  PerThread(const PerThread&) = delete;
  PerThread& operator=(const PerThread&) = delete;

  std::size_t size() const { return elements_.size(); }
  T& operator[](std::size_t thread) { return *elements_[thread]; }

 private:
  T* first() { return reinterpret_cast<T*>(in_place_); }
  template <class... Arguments>
  void make_in_lane(const Arguments&... arguments) {
    const ScratchLane lane(made_);
    T* const place = static_cast<T*>(acquire_scratch(sizeof(T)));
    try {
      new (place) T(arguments...);
    } catch (...) {
      release_scratch(place, sizeof(T));
      throw;
    }
    elements_[made_] = place;
  }
  void release() {
    for (; made_ > 1; --made_) {
      const ScratchLane lane(made_ - 1);
      T* const element = elements_[made_ - 1];
      element->~T();
      release_scratch(element, sizeof(T));
    }
    first()->~T();
  }

  Buffer<T*, 16> elements_;
  std::size_t made_ = 0;
  alignas(T) unsigned char in_place_[sizeof(T)];
};

}  // namespace groupnorm
