"""Builds the image for CPUs where no registry can be reached, and runs what is in it: a check of deploy/Dockerfile.

    python -m tools.run_image_steps --mirror http://deb.debian.org/debian
    python -m tools.run_image_steps --mirror MIRROR --wheels DIR --index URL

As root, with buildah and debootstrap. The base image is a stand-in: Debian 12 with its Python 3.11, from a mirror of
Debian. With --base IMAGE it is an image that buildah has or can pull, as of `docker build`. Each instruction of the
Dockerfile is carried out as it stands, in a chroot. Then a server of the image is started: without
certificates it has to refuse to; told that something else encrypts, it loads the model of the package, is healthy,
makes a picture, and ends with 0 on SIGTERM. The GPU target is not built, since its base cannot be made this way.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = "localhost/omni-grpc-base:debian12"
IMAGE = "localhost/omni-grpc:steps"
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
CERTIFICATES = "/etc/ssl/certs"
PORT = 50061
REFUSED = f"omni-grpc serve --port {PORT}; test $? = 2"
SERVED = f"""
export OMNI_GRPC_INSECURE=true OMNI_GRPC_SERVER=localhost:{PORT}
tini -s -- omni-grpc serve --port {PORT} & server=$!
omni-grpc wait --timeout 300 && omni-grpc health && omni-grpc generate 'a red circle' --out x.png --seed 7 --quiet
made=$?
kill -TERM $server; wait $server && test -s x.png && exit $made
"""
"""What is run in a container, as the user of the image."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", metavar="IMAGE", help="base image, instead of a stand-in")
    base.add_argument("--mirror", metavar="URL", help="mirror of Debian, from which debootstrap makes a stand-in")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="folder with wheels that pip takes first, such as torch's"
    )
    parser.add_argument("--index", metavar="URL", help="index that has torch, instead of that of the Dockerfile")
    options = parser.parse_args()
    missing = [name for name in ("buildah", *(["debootstrap"] if options.mirror else [])) if shutil.which(name) is None]
    if missing:
        print(f"run_image_steps: {' and '.join(missing)} must be installed", file=sys.stderr)
        return 2
    start = time.monotonic()
    if options.mirror:
        make_stand_in(options.mirror, options.wheels)
    build(options.base or STAND_IN, options.wheels, options.index)
    say(f"built in {time.monotonic() - start:.0f} s")
    for script in (REFUSED, SERVED):
        run_in(script)
    say("the image refuses to serve in the clear, serves when told to, is healthy, makes a picture and ends with 0")
    return 0


def make_stand_in(mirror: str, wheels: Path | None) -> None:
    """An image of Debian with Python, unless there is one from before."""
    if (
        subprocess.run(["buildah", "inspect", "--type", "image", STAND_IN], capture_output=True, check=False).returncode
        == 0
    ):
        say(f"{STAND_IN} is there")
        return
    with tempfile.TemporaryDirectory() as folder:
        call("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, f"{folder}/root", mirror)
        container = output("buildah", "from", "scratch")
        mounted = output("buildah", "mount", container)
        call("cp", "-a", f"{folder}/root/.", mounted)
        call("buildah", "umount", container)
        links = ["--env", f"PIP_FIND_LINKS={wheels}"] if wheels else []
        call("buildah", "config", "--env", f"PIP_CERT={CERTIFICATES}/ca-certificates.crt", *links, container)
        call("buildah", "commit", "--rm", container, STAND_IN)


def build(base: str, wheels: Path | None, index: str | None) -> None:
    """Carries out the Dockerfile."""
    shared = ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    if wheels:
        shared += ["--volume", f"{wheels.resolve()}:{wheels.resolve()}:ro"]
    arguments = ["--build-arg", f"PYTHON_IMAGE={base}"]
    if index:
        arguments += ["--build-arg", f"TORCH_INDEX={index}"]
    dockerfile = ["--file", str(ROOT / "deploy" / "Dockerfile"), "--target", "cpu"]
    # --format docker: the other one has no health checks. --layers: what has not changed is not built again
    how = ["--isolation", "chroot", "--format", "docker", "--layers"]
    call("buildah", "bud", *how, *shared, *arguments, *dockerfile, "--tag", IMAGE, str(ROOT))


def run_in(script: str) -> None:
    """Runs a script in a container. Raises CalledProcessError where it fails."""
    container = output("buildah", "from", IMAGE)
    try:
        call("buildah", "run", "--isolation", "chroot", container, "--", "sh", "-c", script)
    finally:
        call("buildah", "rm", container)


def call(*command: str) -> None:
    say(" ".join(command[:3]))
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def output(*command: str) -> str:
    ran: Sequence[str] = subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    return ran[-1].strip()


def say(text: str) -> None:
    print(f"run_image_steps: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
