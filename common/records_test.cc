// Goal: records come back; every cut and every flipped bit is seen.
#include "common/records.h"

#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(Records, ComeBack) {
  std::string data;
  append_record(1, "abc", &data);
  append_record(3, std::string_view("\0\xff", 2), &data);
  append_record(2, "", &data);
  const FramedRecord first = parse_record(data, 0, 3);
  EXPECT_EQ(first.payload, "abc") << first.problem;
  EXPECT_EQ(first.type, 1);
  EXPECT_EQ(record_length(std::string_view(data).substr(static_cast<size_t>(first.bytes()))), 3);
  const FramedRecord second = parse_record(data, first.bytes(), 3);
  EXPECT_EQ(second.payload, std::string_view("\0\xff", 2)) << second.problem;
  EXPECT_EQ(parse_record(data, first.bytes(), 2).problem, "record type 3");
  const FramedRecord third = parse_record(data, first.bytes() + second.bytes(), 3);
  EXPECT_EQ(third.type, 2) << third.problem;
  EXPECT_TRUE(third.payload.empty());
  EXPECT_EQ(parse_record(data, static_cast<int64_t>(data.size()), 3).problem, "the record's header is cut short");
}

TEST(Records, DamageIsSeen) {
  std::string data;
  append_record(1, "some text", &data);
  for (size_t size = 0; size < data.size(); ++size) EXPECT_NE(parse_record(data.substr(0, size), 0, 255).problem, "") << size;
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    std::string other = data;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(parse_record(other, 0, 255).problem, "") << bit;
  }
}

}  // namespace
}  // namespace slipstream
