#include "learner/journal.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/records.h"
#include "slipstream/v1/journal.pb.h"

namespace slipstream::learner {
namespace {

constexpr char kHead = 1, kBatch = 2, kVersion = 3;  // types of records

void append(char type, std::string_view payload, std::string* out) {
  append_record({std::string_view(&type, 1), payload}, out);
}

absl::Span<const std::byte> bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

absl::Status read_settings(std::string_view payload, JournalSettings* out) {
  v1::JournalHead head;
  if (!head.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) return absl::DataLossError("the head is damaged");
  out->insert(head.settings().begin(), head.settings().end());
  return absl::OkStatus();
}

// Adds a record; `open` is the version it belongs to.
absl::Status take(std::string_view body, bool first, JournalContents::Version* open, JournalContents* out) {
  const char type = body[0];
  const std::string_view payload = body.substr(1);
  if (first != (type == kHead)) return absl::DataLossError(absl::StrCat("record type ", int{type}, ", expected a head at the beginning alone"));
  if (first) return read_settings(payload, &out->settings);
  if (type == kBatch) {
    open->batches.push_back(payload);
  } else if (type == kVersion) {
    open->state = payload;
    out->versions.push_back(std::move(*open));
    *open = {};
  } else {
    return absl::DataLossError(absl::StrCat("record type ", int{type}));
  }
  return absl::OkStatus();
}

}  // namespace

std::string journal_path(const std::string& checkpoint) { return checkpoint + "/journal.log"; }

absl::StatusOr<Journal> Journal::create(const std::string& checkpoint, const JournalSettings& settings) {
  ASSIGN_OR_RETURN(model::OutputFile file, model::OutputFile::create(journal_path(checkpoint)));
  v1::JournalHead head;
  head.mutable_settings()->insert(settings.begin(), settings.end());
  Journal journal(std::move(file));
  append(kHead, head.SerializeAsString(), &journal.pending_);
  RETURN_IF_ERROR(model::sync_directory(checkpoint));
  return journal;
}

void Journal::add(std::string_view batch) {
  CHECK_LT(static_cast<int64_t>(batch.size()), kRecordBytesMax);
  append(kBatch, batch, &pending_);
}

absl::Status Journal::end_version(std::string_view state) {
  append(kVersion, state, &pending_);
  RETURN_IF_ERROR(file_.append(bytes_of(pending_)));
  pending_.clear();
  return file_.sync();
}

absl::StatusOr<std::optional<JournalContents>> read_journal(const std::string& checkpoint) {
  const std::string path = journal_path(checkpoint);
  absl::StatusOr<model::MappedFile> file = model::MappedFile::open(path);
  if (absl::IsNotFound(file.status())) return std::nullopt;
  RETURN_IF_ERROR(file.status());
  JournalContents out{.file = *std::move(file), .settings = {}, .versions = {}};
  const std::string_view data(reinterpret_cast<const char*>(out.file.bytes().data()), out.file.bytes().size());
  const auto damaged = [&](int64_t offset, const std::string& why) {
    return absl::DataLossError(absl::StrCat(path, ": offset ", offset, ": ", why));
  };
  JournalContents::Version open;
  for (int64_t offset = 0; offset < static_cast<int64_t>(data.size());) {
    const FramedRecord record = parse_record(data, offset);
    if (!record.problem.empty()) {
      // What a killed process or machine leaves is damaged up to the end.
      const std::optional<bool> more = has_record_after(data, offset + 1);
      if (more.has_value() && !*more) break;
      return damaged(offset, absl::StrCat(record.problem, ", and intact records follow"));
    }
    const absl::Status taken = take(record.body, offset == 0, &open, &out);
    if (!taken.ok()) return damaged(offset, std::string(taken.message()));
    offset += kRecordHeaderBytes + static_cast<int64_t>(record.body.size());
  }
  if (out.versions.empty()) return std::nullopt;
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
                     found == journal.end() ? "another version's settings" : found->second,
                     "; expected that value for now: start the run with it, stop it once (SIGTERM or Ctrl-C), then change it"));
  }
  return absl::OkStatus();
}

}  // namespace slipstream::learner
