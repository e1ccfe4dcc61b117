// The journal of a checkpoint: the steps after it, by the batches they were trained on. Training a batch again gives the same
// bits, so a policy version is durable once its batches are: at the size of what was learnt from, not of the model. (A
// write-ahead log, as databases have it.)
//
//   <checkpoint>/journal.log   records (common/records.h): a head, then for each policy version the batches of its steps and the
//                              state after them
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "model/mapped_file.h"
#include "model/output_file.h"

namespace slipstream::learner {

using JournalSettings = std::map<std::string, std::string>;  // value by key of the config

// One life's, after the checkpoint that it wrote. One thread.
class Journal {
 public:
  // An empty one, whose name is durable when this returns.
  static absl::StatusOr<Journal> create(const std::string& checkpoint, const JournalSettings& settings);

  // A step's v1.JournalBatch, serialised, less than kRecordBytesMax bytes; kept in memory.
  void add(std::string_view batch);
  // learner.json after the steps added since the last version. Durable, with them, when this returns OK; after an error nothing
  // may follow.
  absl::Status end_version(std::string_view state);

 private:
  explicit Journal(model::OutputFile file) : file_(std::move(file)) {}

  model::OutputFile file_;
  std::string pending_;  // records
};

// What is to be repeated; views into the file.
struct JournalContents {
  struct Version {
    std::vector<std::string_view> batches;
    std::string_view state;
  };
  model::MappedFile file;
  JournalSettings settings;
  std::vector<Version> versions;  // whole ones
  std::string left_out;           // file, offset and what is wrong there; empty: nothing follows the versions
};
// Empty when there is no journal. What follows the last whole version is left out: a killed process or machine was writing it and
// told nobody of it. If it was damaged since, the gateway knows of later versions and refuses the older state. Errors: the file
// cannot be read.
absl::StatusOr<JournalContents> read_journal(const std::string& checkpoint);
void remove_journal(const std::string& checkpoint);
std::string journal_path(const std::string& checkpoint);

// OK, or InvalidArgument that names the setting and both values.
absl::Status expect_same_settings(const JournalSettings& journal, const JournalSettings& mine, const std::string& checkpoint);

}  // namespace slipstream::learner
