#include "learner/journal.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/records.h"
#include "slipstream/v1/journal.pb.h"

namespace slipstream::learner {
namespace {

enum RecordType : uint8_t { kHead = 1, kBatch, kVersion };

// Adds a record; `open` is the version it belongs to. Returns what is wrong with it.
std::string take(const FramedRecord& record, bool first, JournalContents::Version* open, JournalContents* out) {
  if (!record.problem.empty()) return record.problem;
  if (first != (record.type == kHead)) return "a head is not the first record";
  if (record.type == kHead) {
    v1::JournalHead head;
    if (!head.ParseFromArray(record.payload.data(), static_cast<int>(record.payload.size()))) return "the head is no v1.JournalHead";
    out->settings.insert(head.settings().begin(), head.settings().end());
  } else if (record.type == kBatch) {
    open->batches.push_back(record.payload);
  } else {
    open->state = record.payload;
    out->versions.push_back(std::move(*open));
    *open = {};
  }
  return "";
}

}  // namespace

std::string journal_path(const std::string& checkpoint) { return checkpoint + "/journal.log"; }

absl::StatusOr<Journal> Journal::create(const std::string& checkpoint, const JournalSettings& settings) {
  ASSIGN_OR_RETURN(model::OutputFile file, model::OutputFile::create(journal_path(checkpoint)));
  v1::JournalHead head;
  head.mutable_settings()->insert(settings.begin(), settings.end());
  Journal journal(std::move(file));
  append_record(kHead, head.SerializeAsString(), &journal.pending_);
  RETURN_IF_ERROR(model::sync_directory(checkpoint));
  return journal;
}

void Journal::add(std::string_view batch) {
  CHECK_LT(static_cast<int64_t>(batch.size()), kRecordBytesMax);
  append_record(kBatch, batch, &pending_);
}

absl::Status Journal::end_version(std::string_view state) {
  append_record(kVersion, state, &pending_);
  RETURN_IF_ERROR(file_.append(pending_));
  pending_.clear();
  return file_.sync();
}

absl::StatusOr<JournalContents> read_journal(const std::string& checkpoint) {
  JournalContents out;
  const std::string path = journal_path(checkpoint);
  absl::StatusOr<model::MappedFile> file = model::MappedFile::open(path);
  if (absl::IsNotFound(file.status())) return out;
  RETURN_IF_ERROR(file.status());
  out.file = *std::move(file);
  const std::string_view data = out.file.text();
  JournalContents::Version open;
  int64_t last = 0;  // where the last version ends
  std::string problem;
  for (int64_t offset = 0; offset < static_cast<int64_t>(data.size());) {
    const FramedRecord record = parse_record(data, offset, kVersion);
    problem = take(record, offset == 0, &open, &out);
    if (!problem.empty()) break;
    offset += record.bytes();
    if (record.type == kVersion) last = offset;
  }
  if (problem.empty() && !open.batches.empty()) problem = "the file ends";
  if (!problem.empty()) {
    out.left_out = absl::StrCat(path, ": the last ", static_cast<int64_t>(data.size()) - last, " bytes, from offset ", last,
                                ", are no whole version: ", problem);
  }
  return out;
}

void remove_journal(const std::string& checkpoint) {
  std::error_code ignored;
  std::filesystem::remove(journal_path(checkpoint), ignored);
}

absl::Status expect_same_settings(const JournalSettings& journal, const JournalSettings& mine, const std::string& checkpoint) {
  for (const auto& [key, value] : mine) {
    const auto found = journal.find(key);
    if (found != journal.end() && found->second == value) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(key, ": ", value, ", but the steps in ", journal_path(checkpoint), ", which have to be repeated, were trained with ",
                     found == journal.end() ? "a version that did not say" : found->second));
  }
  return absl::OkStatus();
}

}  // namespace slipstream::learner
