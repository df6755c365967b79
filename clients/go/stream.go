package omnigrpc

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

const cancelTimeout = 5 * time.Second

// Stream has the events of one job, each once and in order, even where the connection is lost in between. One goroutine
// may call Next; Close and Cancel may be called by others.
type Stream struct {
	client *Client
	// ctx is that of the rpc; hangUp ends it.
	ctx    context.Context
	hangUp context.CancelFunc
	recv   func() (*v1.JobEvent, error)
	watch  watchState
	first  *v1.JobEvent
	owner  bool
	jobID  string

	leave    sync.Once
	leaveErr error
	ended    chan struct{}
	endOnce  sync.Once
}

// Stream starts a job and gives its events. It returns once the first one is there, so that a request that is refused
// is an error here. Cancelling ctx, or closing the stream before the job has ended, cancels the job on the server.
func (c *Client) Stream(ctx context.Context, request *Request) (*Stream, error) {
	message, err := request.ready()
	if err != nil {
		return nil, err
	}
	made := c.newStream(ctx, watchState{delivery: v1.ArtifactDelivery_ARTIFACT_DELIVERY_INLINE_CHUNKS}, true)
	tried := c.newCalls()
	for {
		if made.recv, err = c.open(made.ctx, message); err == nil {
			made.first, err = made.follow()
		}
		if err == nil {
			made.jobID = made.watch.jobID
			go made.cancelWith(ctx)
			return made, nil
		}
		if err = tried.again(ctx, err); err != nil {
			made.hangUp()
			if ctx.Err() != nil {
				err = c.cancelUnseen(message, fromCall(err, c.address))
			}
			return nil, err
		}
	}
}

// cancelUnseen cancels a job whose context ended before its first event told its id, and returns why there is no
// stream. The job is known by its request_id; there is none where the server had not accepted the request.
func (c *Client) cancelUnseen(message proto.Message, failure *Error) *Error {
	fresh, done := context.WithTimeout(context.Background(), cancelTimeout)
	defer done()
	id := message.(generation).GetOptions().GetRequestId()
	// without the retries of ListJobs: a server that cannot be reached is not to be waited for
	reply, err := c.jobs.ListJobs(fresh, &v1.ListJobsRequest{})
	for _, job := range reply.GetJobs() {
		if job.GetRequestId() == id {
			failure = failure.with(job.GetJobId(), failure.Message)
			_, err = c.CancelJob(fresh, job.GetJobId(), "the client went away")
		}
	}
	if err != nil {
		return failure.with(failure.JobID, fmt.Sprintf("%s; the job could not be cancelled: %v", failure.Message, err))
	}
	return failure
}

// WatchJob gives the events of any job with a seq above afterSeq. Closing it leaves the job alone.
func (c *Client) WatchJob(ctx context.Context, jobID string, afterSeq uint64) (*Stream, error) {
	made := c.newStream(ctx, watchState{
		delivery: v1.ArtifactDelivery_ARTIFACT_DELIVERY_REFERENCE, jobID: jobID, afterSeq: afterSeq,
	}, false)
	made.jobID = jobID
	if err := c.unary(ctx, func(context.Context) (err error) {
		made.recv, err = c.openWatch(made.ctx, made.watch.request())
		if err == nil {
			made.first, err = made.follow()
		}
		if err == io.EOF {
			return nil
		}
		return err
	}); err != nil {
		made.hangUp()
		return nil, err
	}
	return made, nil
}

func (c *Client) newStream(ctx context.Context, watch watchState, owner bool) *Stream {
	inner, hangUp := context.WithCancel(ctx)
	watch.reconnect = c.reconnect
	return &Stream{
		client: c, ctx: inner, hangUp: hangUp, watch: watch, owner: owner, ended: make(chan struct{}),
	}
}

// JobID is the job.
func (s *Stream) JobID() string { return s.jobID }

// Next is the next event, and io.EOF after the one that ends the job. Where a job of Client.Stream failed or was
// cancelled, it is that error in place of io.EOF. When ctx ends, the stream ends with it, as with its own context.
func (s *Stream) Next(ctx context.Context) (*v1.JobEvent, error) {
	if event := s.first; event != nil {
		s.first = nil
		return event, nil
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-ctx.Done():
			s.hangUp()
		case <-stop:
		}
	}()
	event, err := s.follow()
	if err == nil || s.watch.last != nil {
		return event, err
	}
	failure := fromCall(err, s.client.address)
	if ctx.Err() != nil {
		failure = fromCall(ctx.Err(), s.client.address)
	}
	if closing := s.Close(); closing != nil {
		failure = failure.with(s.jobID, fmt.Sprintf("%s; the job could not be cancelled: %v", failure.Message, closing))
	}
	return nil, failure.with(s.jobID, failure.Message)
}

// follow reads on, and resumes after each loss of the connection.
func (s *Stream) follow() (*v1.JobEvent, error) {
	for s.watch.last == nil {
		event, err := s.recv()
		if err == nil {
			fresh, err := s.watch.accept(event)
			if s.watch.last != nil {
				s.finish()
			}
			if err != nil || fresh {
				return event, err
			}
			continue
		}
		var failure *Error
		if err != io.EOF {
			failure = fromCall(err, s.client.address)
		}
		delay, err := s.watch.lost(failure)
		if err != nil {
			return nil, err
		}
		if err = sleep(s.ctx, delay); err != nil {
			return nil, err
		}
		request := s.watch.request()
		if s.recv, err = s.client.openWatch(s.ctx, request); err != nil {
			failed := err
			s.recv = func() (*v1.JobEvent, error) { return nil, failed }
		}
	}
	if err := s.watch.err(); s.owner && err != nil {
		return nil, err
	}
	return nil, io.EOF
}

// finish reads the status that follows the last event, which tells nothing new, so that the call ends as it should.
func (s *Stream) finish() {
	for {
		if _, err := s.recv(); err != nil {
			break
		}
	}
	s.end()
	s.hangUp()
}

// Err says why the job has no result; nil where it succeeded or has not ended.
func (s *Stream) Err() error { return s.watch.err() }

// Cancel asks the server to stop the job; the event `cancelled` tells when it has.
func (s *Stream) Cancel(ctx context.Context, reason string) error {
	_, err := s.client.CancelJob(ctx, s.JobID(), reason)
	return err
}

// Close ends the stream. The job of Client.Stream is cancelled on the server if it has not ended.
func (s *Stream) Close() error {
	s.leave.Do(func() {
		s.hangUp()
		select {
		case <-s.ended:
			return
		default:
		}
		s.end()
		if s.owner {
			// the caller's context may be the one that has ended
			fresh, done := context.WithTimeout(context.Background(), cancelTimeout)
			defer done()
			s.leaveErr = s.Cancel(fresh, "the client went away")
		}
	})
	return s.leaveErr
}

func (s *Stream) end() { s.endOnce.Do(func() { close(s.ended) }) }

// cancelWith cancels the job at once where the context ends, also while nobody reads.
func (s *Stream) cancelWith(ctx context.Context) {
	select {
	case <-ctx.Done():
		// Next and a later Close give this error again
		_ = s.Close()
	case <-s.ended:
	}
}

// open makes the rpc that fits the request.
func (c *Client) open(ctx context.Context, message proto.Message) (func() (*v1.JobEvent, error), error) {
	switch asked := message.(type) {
	case *v1.GenerateImageRequest:
		call, err := c.generation.GenerateImage(ctx, asked)
		return func() (*v1.JobEvent, error) { m, err := call.Recv(); return m.GetEvent(), err }, err
	case *v1.EditImageRequest:
		call, err := c.generation.EditImage(ctx, asked)
		return func() (*v1.JobEvent, error) { m, err := call.Recv(); return m.GetEvent(), err }, err
	case *v1.GenerateVideoRequest:
		call, err := c.generation.GenerateVideo(ctx, asked)
		return func() (*v1.JobEvent, error) { m, err := call.Recv(); return m.GetEvent(), err }, err
	case *v1.GenerateAudioRequest:
		call, err := c.generation.GenerateAudio(ctx, asked)
		return func() (*v1.JobEvent, error) { m, err := call.Recv(); return m.GetEvent(), err }, err
	}
	return nil, refused("request", fmt.Sprintf("%T is not a generation", message))
}

func (c *Client) openWatch(ctx context.Context, asked *v1.WatchJobRequest) (func() (*v1.JobEvent, error), error) {
	call, err := c.jobs.WatchJob(ctx, asked)
	return func() (*v1.JobEvent, error) { m, err := call.Recv(); return m.GetEvent(), err }, err
}
