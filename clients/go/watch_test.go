package omnigrpc

import (
	"crypto/sha256"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

func newWatch() *watchState {
	return &watchState{reconnect: Reconnect{Attempts: 2, FirstDelay: time.Millisecond, LongestDelay: time.Millisecond}}
}

func event(seq uint64) *v1.JobEvent { return &v1.JobEvent{JobId: "j1", Seq: seq} }

func step(seq uint64) *v1.JobEvent {
	made := event(seq)
	made.Event = &v1.JobEvent_StepProgress{StepProgress: &v1.StepProgress{}}
	return made
}

func accept(t *testing.T, watch *watchState, event *v1.JobEvent) bool {
	t.Helper()
	fresh, err := watch.accept(event)
	if err != nil {
		t.Fatal(err)
	}
	return fresh
}

func reasonOf(err error) string {
	var found *Error
	if !errors.As(err, &found) {
		return ""
	}
	return found.Reason
}

func TestWatchGivesEachEventOnce(t *testing.T) {
	watch := newWatch()
	if !accept(t, watch, step(3)) || accept(t, watch, step(3)) || accept(t, watch, step(2)) || !accept(t, watch, step(5)) {
		t.Error("an event was lost or came twice")
	}
	if asked := watch.request(); asked.GetJobId() != "j1" || asked.GetAfterSeq() != 5 {
		t.Errorf("resumes with %v", asked)
	}
}

func TestWatchPassesOverUnknownKindsAndHeartbeats(t *testing.T) {
	watch := newWatch()
	if accept(t, watch, event(4)) || watch.afterSeq != 4 {
		t.Error("an unknown kind is passed over, after noting its seq")
	}
	beat := event(0)
	beat.Event = &v1.JobEvent_Heartbeat{Heartbeat: &v1.Heartbeat{}}
	if accept(t, watch, beat) || watch.afterSeq != 4 {
		t.Error("a heartbeat moves nothing")
	}
}

func TestWatchGivesUpAfterAttemptsWithoutAMessage(t *testing.T) {
	watch := newWatch()
	gone := &Error{Code: codes.Unavailable, Reason: "SERVER_UNREACHABLE"}
	if _, err := watch.lost(gone); err != error(gone) {
		t.Errorf("before the first message the failure itself is returned, not %v", err)
	}
	accept(t, watch, step(1))
	for i := 0; i < 2; i++ {
		if _, err := watch.lost(gone); err != nil {
			t.Fatal(err)
		}
	}
	_, err := watch.lost(gone)
	if reasonOf(err) != "STREAM_LOST" {
		t.Error(err)
	}
	accept(t, watch, step(2))
	if _, err := watch.lost(gone); err != nil {
		t.Errorf("a message resets the count: %v", err)
	}
	if _, err := watch.lost(&Error{Code: codes.NotFound}); reasonOf(err) != "JOB_LOST" {
		t.Error(err)
	}
	if _, err := watch.lost(&Error{Code: codes.PermissionDenied, Reason: "SCOPE_MISSING"}); reasonOf(err) != "SCOPE_MISSING" {
		t.Error(err)
	}
}

func TestWatchAsksForTheLastEventAgain(t *testing.T) {
	watch := newWatch()
	watch.jobID, watch.afterSeq = "j1", 9
	if _, err := watch.lost(nil); err != nil || watch.request().GetAfterSeq() != 8 {
		t.Errorf("%v, %v", err, watch.request())
	}
	if _, err := watch.lost(nil); reasonOf(err) != "STREAM_ENDED" {
		t.Error(err)
	}
}

func TestCancelledAndFailedAreErrors(t *testing.T) {
	watch := newWatch()
	last := event(2)
	last.Event = &v1.JobEvent_Cancelled{Cancelled: &v1.Cancelled{Reason: "no need"}}
	accept(t, watch, last)
	var found *Error
	if !errors.As(watch.err(), &found) || found.Code != codes.Canceled || found.Reason != "JOB_CANCELLED" || found.JobID != "j1" {
		t.Error(watch.err())
	}
}

func TestBytesAreChecked(t *testing.T) {
	data := []byte("some bytes")
	sum := sha256.Sum256(data)
	artifact := &v1.Artifact{ArtifactId: "a1", SizeBytes: uint64(len(data)), Sha256: sum[:]}
	state := &downloadState{artifactID: "a1"}
	send := func(message *v1.DownloadArtifactResponse) error { return state.accept(message) }
	metadata := func(of *v1.Artifact) *v1.DownloadArtifactResponse {
		return &v1.DownloadArtifactResponse{Payload: &v1.DownloadArtifactResponse_Metadata{Metadata: of}}
	}
	chunk := func(offset uint64, data []byte) *v1.DownloadArtifactResponse {
		return &v1.DownloadArtifactResponse{Payload: &v1.DownloadArtifactResponse_Chunk{
			Chunk: &v1.ArtifactChunk{ArtifactId: "a1", Offset: offset, Data: data},
		}}
	}
	if reason := reasonOf(send(chunk(0, data))); reason != "PROTOCOL_ERROR" {
		t.Error(reason)
	}
	for _, message := range []*v1.DownloadArtifactResponse{metadata(artifact), chunk(0, data[:4]), metadata(artifact)} {
		if err := send(message); err != nil {
			t.Fatal(err)
		}
	}
	if state.request().GetOffset() != 4 {
		t.Errorf("goes on at byte %d", state.request().GetOffset())
	}
	if reason := reasonOf(send(chunk(5, data[5:]))); reason != "ARTIFACT_CORRUPT" {
		t.Error("a gap: ", reason)
	}
	if reason := reasonOf(send(metadata(&v1.Artifact{ArtifactId: "a1"}))); reason != "ARTIFACT_CORRUPT" {
		t.Error("another artifact: ", reason)
	}
	if _, err := state.finished(); reasonOf(err) != "ARTIFACT_CORRUPT" {
		t.Error("bytes are missing: ", err)
	}
	if err := send(chunk(4, data[4:])); err != nil {
		t.Fatal(err)
	}
	if got, err := state.finished(); err != nil || string(got) != string(data) {
		t.Error(got, err)
	}
	state.partial.data[0]++
	if _, err := state.finished(); reasonOf(err) != "ARTIFACT_CORRUPT" {
		t.Error("changed bytes: ", err)
	}
}
