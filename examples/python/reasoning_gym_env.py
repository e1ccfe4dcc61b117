"""Serves reasoning-gym (https://github.com/open-thought/reasoning-gym) as a Slipstream environment.

An environment needs nothing of Slipstream but proto/slipstream/v1/{environment,types}.proto: this file generates the Python
code from them when it starts, implements the four calls, and lets reasoning-gym make the problems and score the answers.
Every dataset is a task; an instance is an entry's index; the solution is the entry's answer.

    apt-get install python3-grpcio python3-protobuf python3-venv protobuf-compiler protobuf-compiler-grpc
    python3 -m venv --system-site-packages venv && venv/bin/pip install reasoning-gym
    venv/bin/python examples/python/reasoning_gym_env.py --datasets chain_sum,leg_counting --address 127.0.0.1:7001
    slipstream check-env 127.0.0.1:7001        # does it keep the rules?
"""

import argparse
import collections
import concurrent.futures
import json
import math
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading

import grpc
import reasoning_gym
from reasoning_gym.utils import extract_answer

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"
ANSWER_MAX = 10_000  # characters; some scorers parse what they get
EPISODES_MAX = 4096  # the episode idle for longest is forgotten


def generate_code(proto, out):
    """environment_pb2 and environment_pb2_grpc, as Debian's tools make them."""
    plugin = shutil.which("grpc_python_plugin")
    if plugin is None or shutil.which("protoc") is None:
        sys.exit("reasoning_gym_env: needs protoc and grpc_python_plugin (protobuf-compiler, protobuf-compiler-grpc)")
    subprocess.run(["protoc", f"-I{proto}", f"--python_out={out}", f"--grpc_python_out={out}",
                    f"--plugin=protoc-gen-grpc_python={plugin}",
                    "slipstream/v1/types.proto", "slipstream/v1/environment.proto"], check=True)
    sys.path.insert(0, out)


def make_servicer(datasets, pb, pb_grpc, types):
    def message(role, text):
        return types.Message(role=role, content=str(text).encode())

    class ReasoningGym(pb_grpc.EnvironmentServicer):
        def __init__(self):
            self.lock = threading.Lock()
            self.episodes = collections.OrderedDict()  # by id, the longest unused first

        def Describe(self, request, context):
            tasks = [pb.TaskDescription(name=name.encode(), description=b"reasoning-gym " + name.encode(),
                                        num_instances=len(dataset), max_turns=1, has_solutions=True)
                     for name, dataset in datasets.items()]
            return pb.DescribeResponse(environment=b"reasoning-gym", tasks=tasks)

        def Reset(self, request, context):
            task, index = request.task.decode("utf-8", "replace"), request.instance
            if not request.episode_id:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "episode_id: empty")
            if task not in datasets:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"task: expected one of {', '.join(datasets)}")
            if index >= len(datasets[task]):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"instance: {index}, of {len(datasets[task])}")
            with self.lock:
                episode = self.find(request.episode_id)
                if episode is None:
                    entry = datasets[task][index]
                    solution = message(types.ROLE_ASSISTANT, entry["answer"]) if request.want_solution else None
                    opening = pb.ResetResponse(messages=[message(types.ROLE_USER, entry["question"])], solution=solution)
                    episode = dict(task=task, index=index, opening=opening, answer=None)
                    self.episodes[request.episode_id] = episode
                    if len(self.episodes) > EPISODES_MAX:
                        self.episodes.popitem(last=False)
            if (episode["task"], episode["index"]) != (task, index):
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "episode_id: open with another task or instance")
            return episode["opening"]

        def Step(self, request, context):
            with self.lock:
                episode = self.find(request.episode_id)
                if episode is None:
                    context.abort(grpc.StatusCode.NOT_FOUND, "episode_id: no such episode is open")
                if request.turn != 0:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"turn: {request.turn}, expected 0: there is one")
                if episode["answer"] is None:
                    reward = self.score(episode, request.message.content.decode("utf-8", "replace"))
                    episode["answer"] = pb.StepResponse(done=True, reward=reward, reward_parts={"score": reward})
                return episode["answer"]

        def Close(self, request, context):
            with self.lock:
                self.episodes.pop(request.episode_id, None)
            return pb.CloseResponse()

        def find(self, episode_id):
            if episode_id in self.episodes:
                self.episodes.move_to_end(episode_id)
            return self.episodes.get(episode_id)

        def score(self, episode, text):
            dataset, index = datasets[episode["task"]], episode["index"]
            answer = extract_answer(text[:ANSWER_MAX]) or text[:ANSWER_MAX].strip()  # <answer> tags, if any
            try:
                reward = float(dataset.score_answer(answer=answer, entry=dataset[index]))
            except Exception as error:  # a scorer that cannot read an answer finds it wrong
                print(f"scorer of entry {index}: {error!r}", file=sys.stderr)
                return 0.0
            return reward if math.isfinite(reward) else 0.0

    return ReasoningGym()


def main():
    parser = argparse.ArgumentParser(description="reasoning-gym as a Slipstream environment")
    parser.add_argument("--address", default="127.0.0.1:0", help="host:port; port 0: any free one")
    parser.add_argument("--datasets", default="chain_sum", help="names, separated by commas")
    parser.add_argument("--options", default="{}", help='JSON, a dataset\'s own options by its name: {"chain_sum": {"max_terms": 2}}')
    parser.add_argument("--size", type=int, default=1000, help="instances of each")
    parser.add_argument("--seed", type=int, default=1, help="of all problems")
    flags = parser.parse_args()
    try:
        options = json.loads(flags.options)
        if unknown := set(options) - set(flags.datasets.split(",")):
            sys.exit(f"reasoning_gym_env: --options: {unknown.pop()}, expected names of --datasets")
        datasets = {name: reasoning_gym.create_dataset(name, size=flags.size, seed=flags.seed, **options.get(name, {}))
                    for name in flags.datasets.split(",")}
    except (ValueError, TypeError, AssertionError) as error:  # reasoning-gym asserts what its options must be
        sys.exit(f"reasoning_gym_env: --datasets or --options: {error}")

    with tempfile.TemporaryDirectory() as code:
        generate_code(PROTO, code)
        from slipstream.v1 import environment_pb2, environment_pb2_grpc, types_pb2
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(16),
                         options=[("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)])
    environment_pb2_grpc.add_EnvironmentServicer_to_server(
        make_servicer(datasets, environment_pb2, environment_pb2_grpc, types_pb2), server)
    if (port := server.add_insecure_port(flags.address)) == 0:
        sys.exit(f"reasoning_gym_env: address {flags.address} cannot be bound; is the port in use?")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    print(f"listening on {flags.address.rsplit(':', 1)[0]}:{port}", flush=True)
    ended.wait()
    server.stop(grace=1).wait()


if __name__ == "__main__":
    main()
