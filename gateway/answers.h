// First answers by idempotency key, so that a repeated call gets the same one again.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "common/crc32c.h"
#include "common/status.h"
#include "gateway/hash_ring.h"

namespace slipstream::gateway {

// Answers of one method. An Answer stands for a call that may still be under way. What is complete is forgotten, the oldest
// first, beyond `count_max` answers or `bytes_max` bytes. One thread at a time.
template <class Answer>
class Answers {
 public:
  Answers(size_t count_max, int64_t bytes_max) : count_max_(count_max), bytes_max_(bytes_max) {}

  // The answer of an earlier call with this key, null when there is none. AlreadyExists: its body was another.
  // InvalidArgument: no usable key.
  absl::StatusOr<std::shared_ptr<Answer>> find(const std::string& key, const std::string& body) const {
    if (key.empty() || key.size() > 256) {
      return absl::InvalidArgumentError(absl::StrCat("idempotency_key: ", key.size(), " bytes, expected 1 to 256"));
    }
    const auto known = entries_.find(key);
    if (known == entries_.end()) return std::shared_ptr<Answer>();
    if (known->second.digest != digest(body)) {
      return absl::AlreadyExistsError("idempotency_key: it was used for a call with another body");
    }
    return known->second.answer;
  }
  // The same without a body to compare.
  std::shared_ptr<Answer> answer(const std::string& key) const {
    const auto known = entries_.find(key);
    return known == entries_.end() ? nullptr : known->second.answer;
  }
  void begin(const std::string& key, const std::string& body, std::shared_ptr<Answer> answer) {
    entries_[key] = {digest(body), std::move(answer), 0};
  }
  void complete(const std::string& key, int64_t bytes) {
    entries_.at(key).bytes = bytes;
    complete_.push_back(key);
    bytes_ += bytes;
    while (complete_.size() > count_max_ || (bytes_ > bytes_max_ && complete_.size() > 1)) {
      const auto oldest = entries_.find(complete_.front());
      bytes_ -= oldest->second.bytes;
      entries_.erase(oldest);
      complete_.pop_front();
    }
  }
  // A refused call changed nothing: its repetition is a new one.
  void forget(const std::string& key) { entries_.erase(key); }

 private:
  struct Digest {
    uint64_t hash;
    uint32_t crc;
    size_t size;
    bool operator==(const Digest&) const = default;
  };
  struct Entry {
    Digest digest;
    std::shared_ptr<Answer> answer;
    int64_t bytes = 0;
  };
  static Digest digest(const std::string& body) { return {stable_hash(body), crc32c(body), body.size()}; }

  const size_t count_max_;
  const int64_t bytes_max_;
  absl::flat_hash_map<std::string, Entry> entries_;
  std::list<std::string> complete_;
  int64_t bytes_ = 0;
};

}  // namespace slipstream::gateway
