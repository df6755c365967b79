"""Every store does what the seam says."""

from tests.store import conformance


class TestWriting(conformance.Writing): ...


class TestLists(conformance.Lists): ...


class TestCancelling(conformance.Cancelling): ...


class TestDeleting(conformance.Deleting): ...


class TestFiles(conformance.Files): ...


class TestServers(conformance.ServersOnOneStore): ...


class TestEvents(conformance.Events): ...
