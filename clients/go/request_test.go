package omnigrpc

import (
	"errors"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

func sent(t *testing.T, request *Request) *v1.GenerateImageRequest {
	t.Helper()
	message, err := request.ready()
	if err != nil {
		t.Fatal(err)
	}
	return message.(*v1.GenerateImageRequest)
}

func TestOptionsSetTheirFieldsAlone(t *testing.T) {
	made := sent(t, Image("x", Seed(0), Steps(4), RunTimeout(time.Second), OutputFormat("png"), RequestID("r1"),
		NegativePrompt(""), Labels(map[string]string{"a": "b"}), Set("sampling.guidance.scale", 2.5)))
	scale, zero, four, empty := 2.5, uint64(0), uint32(4), ""
	want := &v1.GenerateImageRequest{
		Prompt: "x", NegativePrompt: &empty, OutputFormat: v1.ImageFormat_IMAGE_FORMAT_PNG,
		Sampling: &v1.SamplingParams{Seed: &zero, Steps: &four, Guidance: &v1.Guidance{Scale: &scale}},
		Options:  &v1.JobOptions{RequestId: "r1", Labels: map[string]string{"a": "b"}, RunTimeout: made.Options.RunTimeout},
	}
	if !proto.Equal(made, want) || made.Options.RunTimeout.AsDuration() != time.Second {
		t.Errorf("%v", made)
	}
}

func TestEveryRequestGetsAnID(t *testing.T) {
	request := Image("x")
	first, second := sent(t, request), sent(t, request)
	form := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	if id := first.GetOptions().GetRequestId(); !form.MatchString(id) || id == second.GetOptions().GetRequestId() {
		t.Errorf("%q", id)
	}
	if first.Width != nil || first.Sampling != nil {
		t.Error("what is not set stays unset")
	}
}

func TestWrongOptionsAreRefusedByField(t *testing.T) {
	for field, request := range map[string]*Request{
		"output_format":  Image("x", OutputFormat("GIFF")),
		"width":          Audio("x", Width(64)),
		"sampling.steps": Image("x", Set("sampling.steps", "many")),
		"no.such":        Image("x", Set("no.such", 1)),
		"request":        FromProto(&v1.ListJobsRequest{}),
	} {
		_, err := request.ready()
		var found *Error
		if !errors.As(err, &found) || len(found.Violations) != 1 || found.Violations[0].Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := Image("x", OutputFormat("unspecified")).ready(); err == nil {
		t.Error("the default is no name")
	}
}

func TestUploadsStartWhereTheirReaderStands(t *testing.T) {
	file := strings.NewReader("some bytes")
	if _, err := file.Seek(5, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if _, start, err := rereadable(file); err != nil || start != 5 {
		t.Error(start, err)
	}
	media, start, err := rereadable(io.MultiReader(strings.NewReader("some "), strings.NewReader("bytes")))
	if err != nil || start != 0 {
		t.Fatal(start, err)
	}
	for i := 0; i < 2; i++ {
		if _, err := media.Seek(start, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		if data, err := io.ReadAll(media); err != nil || string(data) != "some bytes" {
			t.Errorf("%q, %v", data, err)
		}
	}
}

func TestTokensStayOnThisMachineWithoutTLS(t *testing.T) {
	for _, address := range []string{"localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/run/x.sock"} {
		client, err := NewClient(address, WithToken("secret"))
		if err != nil {
			t.Fatal(err)
		}
		if err := client.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, address := range []string{"server.example:50051", "10.0.0.1:50051", "dns:///server.example:50051"} {
		if _, err := NewClient(address, WithToken("secret")); reasonOf(err) != "TOKEN_NEEDS_TLS" {
			t.Errorf("%s: %v", address, err)
		}
	}
	if _, err := NewClient("localhost:1", WithToken("two words")); err == nil {
		t.Error("that is no token")
	}
	for _, address := range []string{"http://server:1", "server", "server:70000", ":50051"} {
		if _, err := NewClient(address); err == nil {
			t.Errorf("%s is no address", address)
		}
	}
}
