package omnigrpc

import (
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// watchState is the position in the event stream of one job, with the bytes that came with it. It does no I/O.
type watchState struct {
	reconnect Reconnect
	delivery  v1.ArtifactDelivery
	jobID     string
	afterSeq  uint64
	// last is the event that ended the job; nil until it comes.
	last      *v1.JobEvent
	connected bool
	attempt   int
	rewound   bool
	files     map[string]*partial
}

// accept takes the next message. True: an event that the caller has not seen, of a kind that is known here, and neither
// a chunk nor a heartbeat.
func (w *watchState) accept(event *v1.JobEvent) (bool, error) {
	w.jobID = event.GetJobId()
	w.connected = true
	w.attempt = 0
	switch kind := event.GetEvent().(type) {
	case *v1.JobEvent_ArtifactChunk:
		file := w.files[kind.ArtifactChunk.GetArtifactId()]
		if file == nil {
			return false, &Error{
				Code: codes.Internal, Reason: "PROTOCOL_ERROR", JobID: w.jobID,
				Message: "bytes of artifact " + kind.ArtifactChunk.GetArtifactId() + " came before it was announced",
			}
		}
		return false, file.add(kind.ArtifactChunk)
	case *v1.JobEvent_Completed, *v1.JobEvent_Failed, *v1.JobEvent_Cancelled:
		w.last = event
	}
	if event.GetSeq() <= w.afterSeq {
		return false, nil
	}
	w.afterSeq = event.GetSeq()
	if ready := event.GetArtifactReady(); ready != nil {
		w.file(ready.GetArtifact())
	}
	return event.GetEvent() != nil, nil
}

// request asks for what came after the last event that was seen.
func (w *watchState) request() *v1.WatchJobRequest {
	after := w.afterSeq
	if w.rewound {
		after--
	}
	return &v1.WatchJobRequest{JobId: w.jobID, AfterSeq: after, Delivery: w.delivery}
}

// lost says how long to wait before watching again, after a call that ended before the job did; nil stands for a call
// that ended without an error. It returns the error to give where watching again is no use.
func (w *watchState) lost(failure *Error) (time.Duration, error) {
	if failure == nil {
		if !w.connected && w.afterSeq > 0 && !w.rewound {
			// nothing follows this event, so it is the job's last: ask for it again, to learn how the job ended
			w.rewound = true
			return 0, nil
		}
		failure = &Error{Code: codes.Unavailable, Reason: "STREAM_ENDED", Message: "the stream ended before the job did"}
	}
	if !w.connected {
		return 0, failure
	}
	if failure.Code == codes.NotFound {
		return 0, &Error{
			Code: codes.Unavailable, Reason: "JOB_LOST", JobID: w.jobID,
			Message: "the connection was lost, and the server no longer knows job " + w.jobID +
				" because it has restarted; send the request again",
		}
	}
	if !failure.lost() || w.attempt >= w.reconnect.Attempts {
		return 0, w.final(failure)
	}
	w.attempt++
	delay := w.reconnect.delay(w.attempt - 1)
	if failure.RetryAfter != nil && *failure.RetryAfter > delay {
		delay = *failure.RetryAfter
	}
	return delay, nil
}

func (w *watchState) final(failure *Error) *Error {
	if failure.timedOut() {
		return failure.with(w.jobID, fmt.Sprintf("the deadline passed after event %d of job %s", w.afterSeq, w.jobID))
	}
	if !failure.lost() {
		return failure.with(w.jobID, failure.Message)
	}
	final := failure.with(w.jobID, fmt.Sprintf(
		"lost the stream and could not reconnect in %d attempts: %s; the job may still be running, resume with "+
			"WatchJob(ctx, %q, %d)", w.attempt, failure.Message, w.jobID, w.afterSeq))
	final.Code = codes.Unavailable
	final.Reason = "STREAM_LOST"
	return final
}

// err says why the job has no result; nil where it succeeded or has not ended.
func (w *watchState) err() error {
	switch kind := w.last.GetEvent().(type) {
	case *v1.JobEvent_Failed:
		found := fromStatus(kind.Failed.GetStatus())
		found.JobID = w.jobID
		return found
	case *v1.JobEvent_Cancelled:
		return &Error{
			Code: codes.Canceled, Reason: "JOB_CANCELLED", JobID: w.jobID, fromServer: true,
			Message: fmt.Sprintf("job %s was cancelled after %d steps: %s", w.jobID,
				kind.Cancelled.GetCompletedSteps(), kind.Cancelled.GetReason()),
		}
	}
	return nil
}

// file has the bytes of an artifact so far.
func (w *watchState) file(artifact *v1.Artifact) *partial {
	if w.files == nil {
		w.files = map[string]*partial{}
	}
	found := w.files[artifact.GetArtifactId()]
	if found == nil {
		found = &partial{artifact: artifact}
		w.files[artifact.GetArtifactId()] = found
	}
	return found
}
