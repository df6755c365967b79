"""The client where nothing but its own dependencies is installed."""

import importlib.util
import subprocess
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

import omni_grpc_client

from omni_grpc.metadata import embedded, has_parameters
from omni_grpc.types.media import ImageFormat
from omni_grpc.types.parameters import NotEmbedded

MEDIA = (b"\xff\xd8\xff\xe0", b"RIFF\0\0\0\0WEBP", b"\0\0\0\x18ftypmp42")


class Installed(unittest.TestCase):
    def test_it_is_the_wheel_and_nothing_else_is_there(self) -> None:
        self.assertIn("site-packages", omni_grpc_client.__file__)
        for name in ("torch", "PIL", "numpy", "av", "rich", "diffusers", "omni_grpc.engine", "omni_grpc.server"):
            with self.subTest(name):
                self.assertIsNone(importlib.util.find_spec(name))

    def test_every_name_is_there(self) -> None:
        for name in omni_grpc_client.__all__:
            self.assertTrue(hasattr(omni_grpc_client, name), name)

    def test_what_needs_the_server_says_so(self) -> None:
        with self.assertRaisesRegex(ImportError, "pip install omni-grpc"):
            from omni_grpc import Omni  # noqa: F401

    def test_a_command_line_of_the_server_is_not_there(self) -> None:
        said = subprocess.run([sys.executable, "-I", "-m", "omni_grpc"], capture_output=True, text=True, check=False)
        self.assertNotEqual(said.returncode, 0)

    def test_what_needs_an_extra_says_which(self) -> None:
        for data, kind in zip(MEDIA, (ImageFormat.JPEG, ImageFormat.WEBP), strict=False):
            with self.subTest(kind), self.assertRaisesRegex(NotEmbedded, "PIL is not installed|not WEBP|damaged"):
                embedded(data, kind, "{}", "")
        self.assertFalse(any(map(has_parameters, MEDIA)))

    def test_a_png_gets_its_parameters_without_any(self) -> None:
        header = b"IHDR" + bytes(13)
        png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\x0d" + header + zlib.crc32(header).to_bytes(4, "big")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "out.png")
            path.write_bytes(embedded(png, ImageFormat.PNG, "{}", "steps: 4"))
            self.assertIn(b"steps: 4", path.read_bytes())


if __name__ == "__main__":
    unittest.main()
