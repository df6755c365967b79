package omnigrpc

import (
	"context"
	"io"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// Result is what a job has made.
type Result struct {
	JobID string
	// Files has the bytes of the outputs, checked against the SHA-256 that the server announced.
	Files [][]byte
	// Artifacts describes them, in the same order.
	Artifacts []*v1.Artifact
	// Effective has the values that were used, after every default.
	Effective *v1.EffectiveParams
	Warnings  []*v1.Warning
	Stats     *v1.GenerationStats
}

// Handler is told of events as they come.
type Handler func(*v1.JobEvent)

// OnStep is told of each denoise step.
func OnStep(tell func(*v1.StepProgress)) Handler {
	return func(event *v1.JobEvent) {
		if step := event.GetStepProgress(); step != nil {
			tell(step)
		}
	}
}

// OnPreview is told of each preview, with its step.
func OnPreview(tell func(step uint32, preview *v1.Preview)) Handler {
	return func(event *v1.JobEvent) {
		for _, preview := range event.GetStepProgress().GetPreviews() {
			tell(event.GetStepProgress().GetStep(), preview)
		}
	}
}

// OnQueued is told of the place in the queue.
func OnQueued(tell func(*v1.Queued)) Handler {
	return func(event *v1.JobEvent) {
		if queued := event.GetQueued(); queued != nil {
			tell(queued)
		}
	}
}

// Generate makes something and waits for it. Cancelling ctx cancels the job on the server.
func (c *Client) Generate(ctx context.Context, request *Request, handlers ...Handler) (*Result, error) {
	stream, err := c.Stream(ctx, request)
	if err != nil {
		return nil, err
	}
	result, err := stream.Result(ctx, handlers...)
	if closing := stream.Close(); err == nil && closing != nil {
		return nil, closing
	}
	return result, err
}

// Result follows the job to its end and fetches the bytes that did not come on the stream. It returns the error that
// ended the job.
func (s *Stream) Result(ctx context.Context, handlers ...Handler) (*Result, error) {
	for {
		event, err := s.Next(ctx)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		for _, handler := range handlers {
			handler(event)
		}
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	done := s.watch.last.GetCompleted()
	result := &Result{
		JobID: s.JobID(), Artifacts: done.GetArtifacts(), Effective: done.GetEffective(),
		Warnings: done.GetWarnings(), Stats: done.GetStats(),
	}
	for _, artifact := range done.GetArtifacts() {
		data, err := s.client.bytesOf(ctx, artifact.GetArtifactId(), s.watch.file(artifact))
		if err != nil {
			return nil, err
		}
		result.Files = append(result.Files, data)
	}
	return result, nil
}

// KindOf is the name of what happened, as in the oneof of JobEvent: "step_progress".
func KindOf(event *v1.JobEvent) string {
	message := event.ProtoReflect()
	field := message.WhichOneof(message.Descriptor().Oneofs().ByName("event"))
	if field == nil {
		return ""
	}
	return string(field.Name())
}
