// Goal: tasks and instances follow from seed and group number alone, in the shares of the weights.
#include "gateway/task_schedule.h"

#include <set>

#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

v1::TaskDescription task(const std::string& name, uint64_t num_instances = 0, bool solutions = false) {
  v1::TaskDescription out;
  out.set_name(name);
  out.set_num_instances(num_instances);
  out.set_has_solutions(solutions);
  return out;
}

std::vector<EnvironmentConfig> environments() {
  std::vector<EnvironmentConfig> out(2);
  out[0].name = "first";
  out[0].tasks = {{.name = "a", .weight = 3}, {.name = "b", .weight = 1, .groups_per_second = 2, .instances = 10}};
  out[1].name = "second";
  return out;
}

TEST(TaskSchedule, FollowsFromSeedAndNumberWhateverTheOrderOfEnvironments) {
  TaskSchedule one(1, environments()), other(1, environments()), reseeded(2, environments());
  const std::vector<v1::TaskDescription> first = {task("b", 20), task("a")}, second = {task("c", 5, true)};
  ASSERT_TRUE(one.set_tasks("first", first).ok());
  EXPECT_FALSE(one.complete());
  ASSERT_TRUE(one.set_tasks("second", second).ok());
  for (TaskSchedule* schedule : {&other, &reseeded}) {
    ASSERT_TRUE(schedule->set_tasks("second", second).ok());
    ASSERT_TRUE(schedule->set_tasks("first", first).ok());
    EXPECT_TRUE(schedule->complete());
  }
  std::map<std::string, int> count;
  std::set<uint64_t> instances_of_b;
  int differs = 0;
  for (uint64_t number = 0; number < 5000; ++number) {
    const ScheduledTask picked = one.group(number), again = other.group(number);
    EXPECT_EQ(picked.task, again.task);
    EXPECT_EQ(picked.instance, again.instance);
    differs += picked.instance != reseeded.group(number).instance;
    ++count[picked.task];
    EXPECT_LT(picked.instance, uint64_t{1} << 63);
    if (picked.task == "b") instances_of_b.insert(picked.instance);
    if (picked.task == "c") {
      EXPECT_LT(picked.instance, 5u);
    }
  }
  EXPECT_NEAR(count["a"], 3000, 150);  // four standard deviations
  EXPECT_NEAR(count["b"], 1000, 120);
  EXPECT_NEAR(count["c"], 1000, 120);
  EXPECT_EQ(instances_of_b.size(), 10u);  // the config's bound, all of them
  EXPECT_EQ(*instances_of_b.rbegin(), 9u);
  EXPECT_GT(differs, 4000);
}

TEST(TaskSchedule, DemonstrationsComeFromTasksWithSolutions) {
  std::vector<EnvironmentConfig> config(1);
  config[0].name = "e";
  config[0].tasks = {{.name = "solved"}, {.name = "withheld", .demonstrations = false}, {.name = "open"}};
  TaskSchedule schedule(1, config);
  ASSERT_TRUE(schedule.set_tasks("e", {task("solved", 1000, true), task("withheld", 0, true), task("open")}).ok());
  std::set<uint64_t> instances;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(schedule.demonstration(3, i, 0)->task, "solved");
    instances.insert(schedule.demonstration(3, i, 0)->instance);
  }
  EXPECT_GT(instances.size(), 80u);
  EXPECT_NE(schedule.demonstration(3, 0, 0)->instance, schedule.demonstration(3, 0, 1)->instance);
}

TEST(TaskSchedule, ErrorsNameEnvironmentAndTask) {
  TaskSchedule schedule(1, environments());
  absl::Status status = schedule.set_tasks("first", {task("a"), task("x")});
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "no task \"b\", it has: a, x");
  status = schedule.set_tasks("first", {task("a"), task("b", 5)});
  EXPECT_EQ(status.message(), "task \"b\": 10 instances wanted, it has 5");
  EXPECT_EQ(schedule.set_tasks("third", {}).message(), "environment \"third\" is not in the config");
  EXPECT_EQ(schedule.set_tasks("second", {}).message(), "describes no task");
  EXPECT_FALSE(schedule.complete());
  std::vector<EnvironmentConfig> weightless(1);
  weightless[0].name = "e";
  weightless[0].tasks = {{.name = "a", .weight = 0}};
  EXPECT_FALSE(TaskSchedule(1, weightless).set_tasks("e", {task("a")}).ok());
}

TEST(TaskSchedule, RateLimitSpacesTheGroupsOfATask) {
  TaskSchedule schedule(1, environments());
  ASSERT_TRUE(schedule.set_tasks("first", {task("a"), task("b", 20)}).ok());
  ASSERT_TRUE(schedule.set_tasks("second", {task("c")}).ok());
  const absl::Time now = absl::FromUnixSeconds(1000);
  EXPECT_LE(schedule.start_time(1), now);
  schedule.started(1, now);
  EXPECT_EQ(schedule.start_time(1), now + absl::Milliseconds(500));
  ASSERT_TRUE(schedule.set_tasks("first", {task("a"), task("b", 20)}).ok());
  EXPECT_EQ(schedule.start_time(1), now + absl::Milliseconds(500));  // a reconnect is no way around it
  schedule.started(0, now);
  EXPECT_LE(schedule.start_time(0), now);
}

}  // namespace
}  // namespace slipstream::gateway
