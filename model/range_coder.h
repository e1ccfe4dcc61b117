// A binary adaptive range coder (Martin 1979; carry handling as in LZMA): a likely bit costs a small part of
// a bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace slipstream::model {

// The probability of a 0, in 1/32768; the first bits move it faster.
struct BitModel {
  uint16_t zero = 1 << 14;
  uint8_t seen = 0;
  void update(bool bit) {
    const int rate = std::min<int>(seen + 1, 6);
    if (seen < 6) ++seen;
    zero = static_cast<uint16_t>(bit ? zero - (zero >> rate) : zero + ((32768 - zero) >> rate));
    zero = std::clamp<uint16_t>(zero, 32, 32768 - 32);
  }
};

class RangeEncoder {
 public:
  void bit(BitModel& model, bool value) {
    const uint32_t bound = (range_ >> 15) * model.zero;
    if (value) {
      low_ += bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    model.update(value);
    normalize();
  }
  // `count` equally likely bits, the highest first.
  void direct(uint32_t value, int count) {
    for (int i = count - 1; i >= 0; --i) {
      range_ >>= 1;
      if ((value >> i & 1) != 0) low_ += range_;
      normalize();
    }
  }
  std::string finish() {
    for (int i = 0; i < 5; ++i) shift();
    // Zeros at the end need not be written: the decoder reads zeros after its input. One byte stays: empty
    // means nothing.
    while (out_.size() > 1 && out_.back() == '\0') out_.pop_back();
    return std::move(out_);
  }

 private:
  void normalize() {
    while (range_ < (1u << 24)) {
      range_ <<= 8;
      shift();
    }
  }
  void shift() {
    if (low_ < 0xff000000u || low_ > 0xffffffffu) {
      const uint8_t carry = static_cast<uint8_t>(low_ >> 32);
      if (started_) out_.push_back(static_cast<char>(held_ + carry));
      for (; pending_ > 0; --pending_) out_.push_back(static_cast<char>(0xff + carry));
      held_ = static_cast<uint8_t>(low_ >> 24);
      started_ = true;
    } else {
      ++pending_;
    }
    low_ = (low_ & 0x00ffffffu) << 8;
  }
  uint64_t low_ = 0;
  uint32_t range_ = 0xffffffffu;
  uint8_t held_ = 0;
  bool started_ = false;
  uint64_t pending_ = 0;  // 0xff bytes that a carry may still turn over
  std::string out_;
};

class RangeDecoder {
 public:
  explicit RangeDecoder(std::string_view in) : in_(in) {
    for (int i = 0; i < 4; ++i) code_ = code_ << 8 | byte();
  }
  bool bit(BitModel& model) {
    const uint32_t bound = (range_ >> 15) * model.zero;
    const bool value = code_ >= bound;
    if (value) {
      code_ -= bound;
      range_ -= bound;
    } else {
      range_ = bound;
    }
    model.update(value);
    normalize();
    return value;
  }
  uint32_t direct(int count) {
    uint32_t value = 0;
    for (int i = 0; i < count; ++i) {
      range_ >>= 1;
      const bool one = code_ >= range_;
      if (one) code_ -= range_;
      value = value << 1 | (one ? 1u : 0u);
      normalize();
    }
    return value;
  }

 private:
  void normalize() {
    while (range_ < (1u << 24)) {
      range_ <<= 8;
      code_ = code_ << 8 | byte();
    }
  }
  uint8_t byte() { return next_ < in_.size() ? static_cast<uint8_t>(in_[next_++]) : uint8_t{0}; }
  std::string_view in_;
  size_t next_ = 0;
  uint32_t range_ = 0xffffffffu;
  uint32_t code_ = 0;
};

}  // namespace slipstream::model
