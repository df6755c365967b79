package omnigrpc

import (
	"bytes"
	"crypto/sha256"
	"fmt"

	"google.golang.org/grpc/codes"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// partial assembles the chunks of an artifact: offsets are checked as they come, the SHA-256 at the end.
type partial struct {
	artifact *v1.Artifact
	data     []byte
}

func (p *partial) offset() uint64 { return uint64(len(p.data)) }

func (p *partial) complete() bool { return p.offset() == p.artifact.GetSizeBytes() }

func (p *partial) add(chunk *v1.ArtifactChunk) error {
	if chunk.GetOffset() != p.offset() {
		return p.corrupt("a chunk starts at byte %d, expected %d", chunk.GetOffset(), p.offset())
	}
	if p.offset()+uint64(len(chunk.GetData())) > p.artifact.GetSizeBytes() {
		return p.corrupt("more than the %d bytes arrived that were announced", p.artifact.GetSizeBytes())
	}
	p.data = append(p.data, chunk.GetData()...)
	return nil
}

// checkResumed tells whether a resumed download is of the artifact whose first bytes are here.
func (p *partial) checkResumed(artifact *v1.Artifact) error {
	same := artifact.GetArtifactId() == p.artifact.GetArtifactId()
	if !same || !bytes.Equal(artifact.GetSha256(), p.artifact.GetSha256()) {
		return p.corrupt("it is another artifact than the one whose first bytes arrived")
	}
	return nil
}

// checked gives all bytes.
func (p *partial) checked() ([]byte, error) {
	if !p.complete() {
		return nil, p.corrupt("%d of %d bytes arrived", p.offset(), p.artifact.GetSizeBytes())
	}
	digest := sha256.Sum256(p.data)
	if !bytes.Equal(digest[:], p.artifact.GetSha256()) {
		return nil, p.corrupt("its SHA-256 is %x, but %x was announced", digest, p.artifact.GetSha256())
	}
	return p.data, nil
}

func (p *partial) corrupt(format string, values ...interface{}) *Error {
	id := p.artifact.GetArtifactId()
	return &Error{
		Code: codes.Internal, Reason: "ARTIFACT_CORRUPT", JobID: p.artifact.GetJobId(),
		Message:  fmt.Sprintf("artifact %s: %s; download it again", id, fmt.Sprintf(format, values...)),
		Metadata: map[string]string{"artifact_id": id},
	}
}
