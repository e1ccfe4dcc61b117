"""Makes a seed corpus for safetensors_fuzz out of real checkpoints.

usage: safetensors_seeds.py OUT_DIR FILE.safetensors...

Each file gives, for its few smallest tensors, a small but whole safetensors file with their names and bytes, the same
as a header alone, and an index. The first byte is the fuzzer's choice of parser. FP8 seeds with scales are made up.
"""

import json
import pathlib
import struct
import sys


def read(path):
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    return header, metadata, data[8 + length :]


def cut(header, metadata, data, count):
    """The `count` smallest tensors as (header text, bytes)."""
    smallest = sorted(header, key=lambda n: (header[n]["data_offsets"][1] - header[n]["data_offsets"][0], n))[:count]
    out, body = ({"__metadata__": metadata} if metadata else {}), b""
    for name in smallest:
        begin, end = header[name]["data_offsets"]
        out[name] = dict(header[name], data_offsets=[len(body), len(body) + end - begin])
        body += data[begin:end]
    return json.dumps(out, separators=(",", ":")).encode(), body


def fp8():
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [3, 4], "data_offsets": [16, 28]},
        "a.weight_scale_inv": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F16", "shape": [2, 1], "data_offsets": [28, 32]},
        "c": {"dtype": "BF16", "shape": [], "data_offsets": [32, 34]},
        "d": {"dtype": "I32", "shape": [0, 7], "data_offsets": [34, 34]},
    }
    return json.dumps(header).encode(), struct.pack("<4f", 1, 2, 0.5, 4) + bytes(range(18))


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    pieces = {"fp8": fp8()}
    for arg in sys.argv[2:]:
        path = pathlib.Path(arg)
        for count in (1, 3, 8):
            pieces[f"{path.parent.name}-{path.stem}-{count}"] = cut(*read(path), count)
    for name, (header, body) in pieces.items():
        (out / f"{name}.file").write_bytes(b"\0" + struct.pack("<Q", len(header)) + header + body)
        (out / f"{name}.header").write_bytes(b"\1" + struct.pack("<H", min(len(body), 65535)) + header)
        names = [n for n in json.loads(header) if n != "__metadata__"]
        index = {
            "metadata": {"total_size": len(body), "more": [1, {"x": None}, -2.5, True]},
            "weight_map": {n: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, n in enumerate(names)},
        }
        (out / f"{name}.index").write_bytes(b"\2" + json.dumps(index).encode())


if __name__ == "__main__":
    main()
