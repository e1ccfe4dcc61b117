// Figures of a trained batch: mismatch and drift apart, masked tokens per side, staleness, rewards (rl-spec 4
// and 8).
#pragma once

#include "common/metrics.h"
#include "learner/step_report.h"
#include "learner/trainer.h"

namespace slipstream::learner {

// Which weights the batch was scored with.
struct ScoredWith {
  int32_t policy_version = 0;
  bool exactly = true;  // nothing was updated since that version was published; else no token can be one of
                        // these weights
};

// Fills the report's figures that follow from the batch and the step: mismatch, drift, masks, staleness,
// rewards of the trained trajectories, loss, sizes. Counts come from elsewhere.
void fill_report(const TrainingBatch& batch, const StepResult& result, const ScoredWith& weights,
                 StepReport* report);

// Per-token and per-trajectory histograms, and every gauge and counter of the report (rl-spec 8).
void record_metrics(const TrainingBatch& batch, const StepResult& result, const ScoredWith& weights,
                    const StepReport& report, Metrics& metrics);

}  // namespace slipstream::learner
