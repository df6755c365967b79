package omnigrpc

import (
	"time"

	"google.golang.org/grpc/codes"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// downloadState has the bytes of one artifact so far. It does no I/O.
type downloadState struct {
	reconnect  Reconnect
	artifactID string
	// partial has what came already, maybe another way; nil before the metadata.
	partial   *partial
	connected bool
	attempt   int
}

// request asks for what is missing.
func (d *downloadState) request() *v1.DownloadArtifactRequest {
	asked := &v1.DownloadArtifactRequest{ArtifactId: d.artifactID}
	if d.partial != nil {
		asked.Offset = d.partial.offset()
	}
	return asked
}

func (d *downloadState) accept(message *v1.DownloadArtifactResponse) error {
	d.connected = true
	d.attempt = 0
	if chunk := message.GetChunk(); chunk != nil {
		if d.partial == nil {
			return d.noMetadata()
		}
		return d.partial.add(chunk)
	}
	if message.GetMetadata() == nil {
		return nil
	}
	if d.partial == nil {
		d.partial = &partial{artifact: message.GetMetadata()}
		return nil
	}
	return d.partial.checkResumed(message.GetMetadata())
}

// finished gives the bytes once the call has ended without an error.
func (d *downloadState) finished() ([]byte, error) {
	if d.partial == nil {
		return nil, d.noMetadata()
	}
	return d.partial.checked()
}

// lost says how long to wait before the next call, or returns the error where another one is no use.
func (d *downloadState) lost(failure *Error) (time.Duration, error) {
	if !failure.lost() || d.attempt >= d.reconnect.Attempts {
		return 0, failure
	}
	d.attempt++
	return d.reconnect.delay(d.attempt - 1), nil
}

func (d *downloadState) noMetadata() *Error {
	return &Error{
		Code: codes.Internal, Reason: "PROTOCOL_ERROR",
		Message:  "the download of artifact " + d.artifactID + " did not start with its metadata",
		Metadata: map[string]string{"artifact_id": d.artifactID},
	}
}
