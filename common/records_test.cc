// Goal: records come back; every cut and every flipped bit is seen; an intact record behind damage is found.
#include "common/records.h"

#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(Records, ComeBackInParts) {
  std::string data;
  append_record({"a", "bc"}, &data);
  append_record({std::string_view("\0\xff", 2)}, &data);
  const FramedRecord first = parse_record(data, 0);
  EXPECT_EQ(first.body, "abc") << first.problem;
  const int64_t second = kRecordHeaderBytes + 3;
  EXPECT_EQ(record_length(data.substr(static_cast<size_t>(second))), 2);
  EXPECT_EQ(parse_record(data, second).body, std::string_view("\0\xff", 2));
  EXPECT_EQ(parse_record(data, static_cast<int64_t>(data.size())).problem, "the record's header is cut short");
}

TEST(Records, DamageIsSeen) {
  std::string data;
  append_record({"some text"}, &data);
  for (size_t size = 0; size < data.size(); ++size) EXPECT_NE(parse_record(data.substr(0, size), 0).problem, "") << size;
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    std::string other = data;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(parse_record(other, 0).problem, "") << bit;
    EXPECT_EQ(has_record_after(other, 1), false) << bit;
    EXPECT_EQ(has_record_after(other + data, 1), true) << bit;
  }
}

}  // namespace
}  // namespace slipstream
