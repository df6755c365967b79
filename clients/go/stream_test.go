package omnigrpc

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// silent accepts a generation, and never says so.
type silent struct {
	v1.UnimplementedGenerationServiceServer
	v1.UnimplementedJobServiceServer
	accepted  chan string
	cancelled chan string
	requestID string
}

func (s *silent) GenerateImage(asked *v1.GenerateImageRequest, call v1.GenerationService_GenerateImageServer) error {
	s.accepted <- asked.GetOptions().GetRequestId()
	<-call.Context().Done()
	return call.Context().Err()
}

func (s *silent) ListJobs(context.Context, *v1.ListJobsRequest) (*v1.ListJobsResponse, error) {
	return &v1.ListJobsResponse{Jobs: []*v1.Job{
		{JobId: "another", RequestId: "r0"}, {JobId: "j1", RequestId: s.requestID},
	}}, nil
}

func (s *silent) CancelJob(_ context.Context, asked *v1.CancelJobRequest) (*v1.CancelJobResponse, error) {
	s.cancelled <- asked.GetJobId()
	return &v1.CancelJobResponse{}, nil
}

func TestAJobIsCancelledBeforeItsFirstEvent(t *testing.T) {
	// the server of this process has to encode as the client does
	encoding.RegisterCodec(codec{})
	listener, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	service := &silent{accepted: make(chan string, 1), cancelled: make(chan string, 2), requestID: "r1"}
	server := grpc.NewServer()
	v1.RegisterGenerationServiceServer(server, service)
	v1.RegisterJobServiceServer(server, service)
	go func() {
		if err := server.Serve(listener); err != nil {
			t.Error(err)
		}
	}()
	defer server.Stop()
	client, err := NewClient(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		<-service.accepted
		stop()
	}()
	_, err = client.Generate(ctx, Image("x", RequestID("r1")))
	var found *Error
	if !errors.As(err, &found) || !errors.Is(err, context.Canceled) || found.JobID != "j1" {
		t.Errorf("%+v", err)
	}
	select {
	case id := <-service.cancelled:
		if id != "j1" {
			t.Errorf("cancelled %s", id)
		}
	case <-time.After(5 * time.Second):
		t.Error("nothing was cancelled")
	}
}
