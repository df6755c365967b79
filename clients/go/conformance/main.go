// The program of the shared list of behaviours: ../../conformance/README.md.
package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	omnigrpc "github.com/omni-grpc/omni_grpc/clients/go"
)

type object map[string]interface{}

// asked is the input.
type asked struct {
	Behaviour    string   `json:"behaviour"`
	Address      string   `json:"address"`
	CA           string   `json:"ca"`
	OtherCA      string   `json:"other_ca"`
	Token        *string  `json:"token"`
	Tokens       []string `json:"tokens"`
	Model        string   `json:"model"`
	Prompt       string   `json:"prompt"`
	OtherPrompt  string   `json:"other_prompt"`
	Width        *uint32  `json:"width"`
	Height       *uint32  `json:"height"`
	Steps        *uint32  `json:"steps"`
	Seed         *uint64  `json:"seed"`
	Image        string   `json:"image"`
	File         string   `json:"file"`
	ArtifactID   string   `json:"artifact_id"`
	JobID        string   `json:"job_id"`
	AfterSeq     uint64   `json:"after_seq"`
	RunTimeout   float64  `json:"run_timeout"`
	Timeout      float64  `json:"timeout"`
	OutputFormat string   `json:"output_format"`
	RequestID    string   `json:"request_id"`
}

func (a asked) client(more ...omnigrpc.ClientOption) (*omnigrpc.Client, error) {
	var options []omnigrpc.ClientOption
	if a.CA != "" {
		options = append(options, omnigrpc.WithCA(a.CA))
	}
	if a.Token != nil {
		options = append(options, omnigrpc.WithToken(*a.Token))
	}
	return omnigrpc.NewClient(a.Address, append(options, more...)...)
}

// settings are the options of a request, without those that the input does not have.
func (a asked) settings(more ...omnigrpc.Option) []omnigrpc.Option {
	options := []omnigrpc.Option{omnigrpc.Model(a.Model)}
	if a.Width != nil {
		options = append(options, omnigrpc.Width(*a.Width))
	}
	if a.Height != nil {
		options = append(options, omnigrpc.Height(*a.Height))
	}
	if a.Steps != nil {
		options = append(options, omnigrpc.Steps(*a.Steps))
	}
	if a.Seed != nil {
		options = append(options, omnigrpc.Seed(*a.Seed))
	}
	return append(options, more...)
}

func (a asked) image(more ...omnigrpc.Option) *omnigrpc.Request {
	return omnigrpc.Image(a.Prompt, a.settings(more...)...)
}

func digest(data []byte) string {
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

func outputs(result *omnigrpc.Result) []object {
	found := []object{}
	for i, artifact := range result.Artifacts {
		found = append(found, object{
			"mime_type": artifact.GetMimeType(), "sha256": digest(result.Files[i]), "seed": artifact.Seed,
		})
	}
	return found
}

// said is an error as the list wants it.
func said(err error) (object, error) {
	var found *omnigrpc.Error
	if !errors.As(err, &found) {
		return nil, fmt.Errorf("expected an error of the client, got %v", err)
	}
	fields := object{}
	for _, violation := range found.Violations {
		fields[violation.Field] = violation.Description
	}
	var retryAfter *float64
	if found.RetryAfter != nil {
		seconds := found.RetryAfter.Seconds()
		retryAfter = &seconds
	}
	return object{
		"code": omnigrpc.CodeName(found.Code), "reason": found.Reason, "fields": fields, "retry_after": retryAfter,
		"job_id": found.JobID,
	}, nil
}

func run() error {
	var given asked
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		return err
	}
	show, ok := behaviours()[given.Behaviour]
	if !ok {
		return fmt.Errorf("no behaviour %q", given.Behaviour)
	}
	found, err := show(given)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
