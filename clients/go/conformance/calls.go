package main

import (
	"context"
	"encoding/hex"

	omnigrpc "github.com/omni-grpc/omni_grpc/clients/go"
)

func behaviours() map[string]func(asked) (object, error) {
	return map[string]func(asked) (object, error){
		"generate": generate, "progress": progress, "previews": previews, "unset": unset, "edit": edit,
		"upload": upload, "download": download, "corrupt": corrupt, "resume": resume, "watch": watch,
		"cancel": cancel, "cancelled": refusedGeneration, "failure": failure, "fields": refusedGeneration,
		"names": names, "idempotent": idempotent, "deadline": deadline, "retry": retry, "retry_info": retryInfo,
		"token": token, "tls": withTLS,
	}
}

func upload(a asked) (object, error) {
	stored, err := a.stored(a.File)
	return object{
		"asset_id": stored.GetAssetId(), "size_bytes": stored.GetSizeBytes(),
		"sha256": hex.EncodeToString(stored.GetSha256()),
	}, err
}

func download(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	data, err := client.Download(context.Background(), a.ArtifactID)
	return object{"sha256": digest(data), "size_bytes": len(data)}, err
}

func corrupt(a asked) (object, error) {
	_, err := download(a)
	found, err := said(err)
	return object{"error": found}, err
}

func idempotent(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	ids := []string{}
	for i := 0; i < 2; i++ {
		job, err := client.CreateJob(context.Background(), a.image(omnigrpc.RequestID(a.RequestID)))
		if err != nil {
			return nil, err
		}
		ids = append(ids, job.GetJobId())
	}
	other := omnigrpc.Image(a.OtherPrompt, a.settings(omnigrpc.RequestID(a.RequestID))...)
	_, err = client.CreateJob(context.Background(), other)
	found, err := said(err)
	return object{"job_ids": ids, "error": found}, err
}

func retry(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	models, err := modelNames(client)
	return object{"models": models}, err
}

func modelNames(client *omnigrpc.Client) ([]string, error) {
	models, err := client.ListModels(context.Background())
	found := []string{}
	for _, model := range models {
		found = append(found, model.GetName())
	}
	return found, err
}

func retryInfo(a asked) (object, error) {
	client, err := a.client()
	if err != nil {
		return nil, err
	}
	defer client.Close()
	job, err := client.CreateJob(context.Background(), a.image())
	return object{"job_id": job.GetJobId()}, err
}

func token(a asked) (object, error) {
	next := 0
	client, err := a.client(omnigrpc.WithTokenFunc(func(context.Context) (string, error) {
		next++
		return a.Tokens[next-1], nil
	}))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	_, refusal := modelNames(client)
	found, err := said(refusal)
	if err != nil {
		return nil, err
	}
	models, err := modelNames(client)
	return object{"error": found, "models": models}, err
}

func withTLS(a asked) (object, error) {
	listed, err := retry(a)
	if err != nil {
		return nil, err
	}
	other := a
	other.CA = a.OtherCA
	_, failed := retry(other)
	unknown, err := said(failed)
	if err != nil {
		return nil, err
	}
	_, plain := omnigrpc.NewClient("server.example:50051", omnigrpc.WithToken("secret"))
	refused, err := said(plain)
	return object{"models": listed["models"], "error": unknown, "refused": refused}, err
}
