// TensorBoard event files: what `tensorboard --logdir runs` reads. Records framed with CRCs (TFRecord),
// events in protobuf wire format; only scalars.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

#include "common/status.h"

namespace slipstream::learner {

// Used by one thread. Closing writes what is buffered.
class TensorBoardWriter {
 public:
  // Opens a new file in `directory` (made if missing); files of earlier starts stay. first_step: the first
  // step this start will write; points of an earlier start from there on are superseded in what TensorBoard
  // shows. PermissionDenied: names the file.
  static absl::StatusOr<TensorBoardWriter> open(const std::string& directory, int64_t first_step);

  // A non-finite value is written as it is; TensorBoard marks it. Errors (a full disk) surface in flush().
  void scalar(std::string_view name, int64_t step, double value);
  absl::Status flush();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  TensorBoardWriter(std::string path, std::FILE* file) : path_(std::move(path)), file_(file) {}
  void event(int64_t step, uint32_t field, std::string_view content);

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace slipstream::learner
