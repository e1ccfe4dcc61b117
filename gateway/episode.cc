#include "gateway/episode.h"

namespace slipstream::gateway {

void identify(const EpisodePlan& plan, v1::Trajectory* trajectory) {
  trajectory->set_rollout_id(plan.rollout_id);
  trajectory->set_group_id(plan.group_id);
  trajectory->set_group_index(plan.group_index);
  trajectory->set_kind(plan.kind);
  trajectory->set_environment(plan.environment);
  trajectory->set_task(plan.task);
  trajectory->set_instance(plan.instance);
}

}  // namespace slipstream::gateway
