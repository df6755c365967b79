package main

import (
	"context"
	"io"
	"os"
	"time"

	omnigrpc "github.com/omni-grpc/omni_grpc/clients/go"
	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

func generate(a asked) (object, error) {
	result, err := a.generated(context.Background(), a.image())
	if err != nil {
		return nil, err
	}
	return object{
		"job_id": result.JobID, "outputs": outputs(result), "steps": result.Effective.GetSteps(),
		"width": result.Effective.GetWidth(), "warnings": len(result.Warnings),
	}, nil
}

func (a asked) generated(
	ctx context.Context, request *omnigrpc.Request, handlers ...omnigrpc.Handler,
) (*omnigrpc.Result, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	return client.Generate(ctx, request, handlers...)
}

func progress(a asked) (object, error) {
	kinds, steps := []string{}, [][]uint32{}
	_, err := a.generated(context.Background(), a.image(), func(event *v1.JobEvent) {
		kinds = append(kinds, omnigrpc.KindOf(event))
	}, omnigrpc.OnStep(func(step *v1.StepProgress) {
		steps = append(steps, []uint32{step.GetStep(), step.GetTotalSteps()})
	}))
	return object{"kinds": kinds, "steps": steps}, err
}

func previews(a asked) (object, error) {
	found := []object{}
	_, err := a.generated(context.Background(), a.image(omnigrpc.Previews(1)),
		omnigrpc.OnPreview(func(step uint32, preview *v1.Preview) {
			found = append(found, object{
				"step": step, "mime_type": preview.GetMimeType(), "sha256": digest(preview.GetData()),
			})
		}))
	return object{"previews": found}, err
}

func unset(a asked) (object, error) {
	seeds, files := []uint64{}, []string{}
	for _, options := range [][]omnigrpc.Option{nil, {omnigrpc.Seed(0)}, {omnigrpc.Seed(0)}} {
		result, err := a.generated(context.Background(), a.image(options...))
		if err != nil {
			return nil, err
		}
		seeds = append(seeds, result.Artifacts[0].GetSeed())
		files = append(files, digest(result.Files[0]))
	}
	return object{"seeds": seeds, "same": files[1] == files[2]}, nil
}

func edit(a asked) (object, error) {
	stored, err := a.stored(a.Image)
	if err != nil {
		return nil, err
	}
	images := []*v1.MediaInput{omnigrpc.Asset(stored.GetAssetId())}
	result, err := a.generated(context.Background(), omnigrpc.Edit(a.Prompt, images, a.settings()...))
	if err != nil {
		return nil, err
	}
	return object{"asset_id": stored.GetAssetId(), "outputs": outputs(result)}, nil
}

func (a asked) stored(path string) (*v1.UploadAssetResponse, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return client.Upload(context.Background(), file, "image/png")
}

func resume(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	stream, err := client.Stream(context.Background(), a.image())
	if err != nil {
		return nil, err
	}
	return watched(stream)
}

func watch(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	stream, err := client.WatchJob(context.Background(), a.JobID, a.AfterSeq)
	if err != nil {
		return nil, err
	}
	return watched(stream)
}

func watched(stream *omnigrpc.Stream) (object, error) {
	defer stream.Close()
	seqs, kinds := []uint64{}, []string{}
	result, err := stream.Result(context.Background(), func(event *v1.JobEvent) {
		seqs = append(seqs, event.GetSeq())
		kinds = append(kinds, omnigrpc.KindOf(event))
	})
	if err != nil {
		return nil, err
	}
	return object{"seqs": seqs, "kinds": kinds, "outputs": outputs(result)}, nil
}

// cancel ends the context after the first step, which is how Go cancels.
func cancel(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	stream, err := client.Stream(ctx, a.image())
	if err != nil {
		return nil, err
	}
	for {
		event, err := stream.Next(ctx)
		if event.GetStepProgress() != nil {
			stop()
		}
		if err == io.EOF {
			return nil, err
		}
		if err != nil {
			return object{"job_id": stream.JobID()}, nil
		}
	}
}

func failed(ctx context.Context, a asked, options ...omnigrpc.Option) (object, error) {
	_, err := a.generated(ctx, a.image(options...))
	found, err := said(err)
	return object{"error": found}, err
}

func refusedGeneration(a asked) (object, error) { return failed(context.Background(), a) }

func failure(a asked) (object, error) {
	return failed(context.Background(), a, omnigrpc.RunTimeout(seconds(a.RunTimeout)))
}

func names(a asked) (object, error) {
	return failed(context.Background(), a, omnigrpc.OutputFormat(a.OutputFormat))
}

func deadline(a asked) (object, error) {
	ctx, stop := context.WithTimeout(context.Background(), seconds(a.Timeout))
	defer stop()
	return failed(ctx, a)
}

func seconds(of float64) time.Duration { return time.Duration(of * float64(time.Second)) }
