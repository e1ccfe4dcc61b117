"""Goal: TensorBoard's own reader reads our event files, and shows a restarted run without the steps done twice.
usage: read_events.py WRITE_EVENTS. Skipped (77), and said so, without the tensorboard package."""
import subprocess
import sys
import tempfile

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError:
    print("skipped: this Python has no tensorboard")
    sys.exit(77)

with tempfile.TemporaryDirectory() as directory:
    subprocess.run([sys.argv[1], directory], check=True)
    events = EventAccumulator(directory)
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss/policy", "reward/mean"], events.Tags()
    reward = [(point.step, point.value) for point in events.Scalars("reward/mean")]
    expected = [(step, step + 0.25) for step in range(5)] + [(step, step + 0.5) for step in range(5, 13)]
    assert reward == expected, reward
    assert all(abs(p.value + 1e-3 * p.step) < 1e-9 for p in events.Scalars("loss/policy"))
    assert all(p.wall_time > 1.6e9 for p in events.Scalars("loss/policy"))
print("tensorboard: ok")
