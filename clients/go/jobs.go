package omnigrpc

import (
	"context"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// CreateJob queues a job that outlives this client. With the RequestID of an earlier request it is the same job.
func (c *Client) CreateJob(ctx context.Context, request *Request) (*v1.Job, error) {
	message, err := request.ready()
	if err != nil {
		return nil, err
	}
	asked := &v1.CreateJobRequest{}
	switch task := message.(type) {
	case *v1.GenerateImageRequest:
		asked.Task = &v1.CreateJobRequest_GenerateImage{GenerateImage: task}
	case *v1.EditImageRequest:
		asked.Task = &v1.CreateJobRequest_EditImage{EditImage: task}
	case *v1.GenerateVideoRequest:
		asked.Task = &v1.CreateJobRequest_GenerateVideo{GenerateVideo: task}
	case *v1.GenerateAudioRequest:
		asked.Task = &v1.CreateJobRequest_GenerateAudio{GenerateAudio: task}
	default:
		return nil, refused("request", "it is not a generation")
	}
	var reply *v1.CreateJobResponse
	err = c.unary(ctx, func(ctx context.Context) (err error) {
		reply, err = c.jobs.CreateJob(ctx, asked)
		return err
	})
	return reply.GetJob(), err
}

// GetJob is a job as it stands.
func (c *Client) GetJob(ctx context.Context, jobID string) (*v1.Job, error) {
	var reply *v1.GetJobResponse
	err := c.unary(ctx, func(ctx context.Context) (err error) {
		reply, err = c.jobs.GetJob(ctx, &v1.GetJobRequest{JobId: jobID})
		return err
	})
	return reply.GetJob(), err
}

// ListJobs is one page of jobs, newest first; NextPageToken of the reply leads to the next.
func (c *Client) ListJobs(ctx context.Context, asked *v1.ListJobsRequest) (*v1.ListJobsResponse, error) {
	var reply *v1.ListJobsResponse
	err := c.unary(ctx, func(ctx context.Context) (err error) {
		reply, err = c.jobs.ListJobs(ctx, asked)
		return err
	})
	return reply, err
}

// CancelJob asks a job to stop; one that has ended stays as it is.
func (c *Client) CancelJob(ctx context.Context, jobID, reason string) (*v1.Job, error) {
	var reply *v1.CancelJobResponse
	err := c.unary(ctx, func(ctx context.Context) (err error) {
		reply, err = c.jobs.CancelJob(ctx, &v1.CancelJobRequest{JobId: jobID, Reason: reason})
		return err
	})
	return reply.GetJob(), err
}

// ListModels are the models of the server.
func (c *Client) ListModels(ctx context.Context) ([]*v1.Model, error) {
	var reply *v1.ListModelsResponse
	err := c.unary(ctx, func(ctx context.Context) (err error) {
		reply, err = c.models.ListModels(ctx, &v1.ListModelsRequest{})
		return err
	})
	return reply.GetModels(), err
}
