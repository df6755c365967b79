// Generates an image on the server at localhost:50051 and saves it: go run ./examples/generate "a red circle".
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"

	omnigrpc "github.com/omni-grpc/omni_grpc/clients/go"
	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: generate PROMPT")
	}
	// Ctrl-C cancels the job
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	client, err := omnigrpc.NewClient("localhost:50051")
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	request := omnigrpc.Image(os.Args[1], omnigrpc.Size(512, 512), omnigrpc.Steps(20))
	result, err := client.Generate(ctx, request, omnigrpc.OnStep(func(step *v1.StepProgress) {
		fmt.Printf("step %d of %d\n", step.GetStep(), step.GetTotalSteps())
	}))
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile("out.png", result.Files[0], 0o644); err != nil {
		log.Fatal(err)
	}
}
