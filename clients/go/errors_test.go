package omnigrpc

import (
	"context"
	"errors"
	"testing"
	"time"

	legacy "github.com/golang/protobuf/proto"
	"github.com/golang/protobuf/ptypes"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func detailed(t *testing.T, code codes.Code, details ...legacy.Message) error {
	t.Helper()
	found, err := status.New(code, "no").WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return found.Err()
}

func TestErrorHasTheDetailsOfItsStatus(t *testing.T) {
	found := fromCall(detailed(t, codes.InvalidArgument,
		&errdetails.ErrorInfo{Reason: "BAD_FIELD", Metadata: map[string]string{"job_id": "j1"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: "width", Description: "use 64"},
		}},
		&errdetails.RetryInfo{RetryDelay: ptypes.DurationProto(1500 * time.Millisecond)},
	), "here")
	if found.Code != codes.InvalidArgument || found.Reason != "BAD_FIELD" || found.JobID != "j1" {
		t.Errorf("%+v", found)
	}
	if len(found.Violations) != 1 || found.Violations[0] != (Violation{"width", "use 64"}) {
		t.Errorf("violations %+v", found.Violations)
	}
	if found.RetryAfter == nil || *found.RetryAfter != 1500*time.Millisecond {
		t.Errorf("retry after %v", found.RetryAfter)
	}
	if !found.fromServer {
		t.Error("details come from the server alone")
	}
}

func TestErrorOfTheConnection(t *testing.T) {
	for _, one := range []struct {
		code   codes.Code
		reason string
		lost   bool
	}{
		{codes.Unavailable, "SERVER_UNREACHABLE", true},
		{codes.Internal, "INTERNAL", true},
		{codes.DeadlineExceeded, "CALL_DEADLINE", false},
		{codes.Canceled, "CALL_CANCELLED", false},
		{codes.NotFound, "NOT_FOUND", false},
	} {
		found := fromCall(status.Error(one.code, "no"), "here")
		if found.Reason != one.reason || found.lost() != one.lost {
			t.Errorf("%v: reason %s, lost %v", one.code, found.Reason, found.lost())
		}
	}
	bug := fromCall(detailed(t, codes.Internal, &errdetails.ErrorInfo{Reason: "INTERNAL"}), "here")
	if bug.lost() {
		t.Error("a bug of the server is no lost connection")
	}
}

func TestErrorUnwrapsToTheContext(t *testing.T) {
	var err error = fromCall(context.DeadlineExceeded, "here")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	var found *Error
	if !errors.As(err, &found) || found.Code != codes.DeadlineExceeded {
		t.Error(err)
	}
}

func TestCodeName(t *testing.T) {
	for code, name := range map[codes.Code]string{
		codes.OK: "OK", codes.Canceled: "CANCELLED", codes.InvalidArgument: "INVALID_ARGUMENT",
		codes.DeadlineExceeded: "DEADLINE_EXCEEDED", codes.Internal: "INTERNAL",
	} {
		if CodeName(code) != name {
			t.Errorf("%v is %s, expected %s", code, CodeName(code), name)
		}
	}
}

func TestRetryPause(t *testing.T) {
	after := func(seconds time.Duration) *Error {
		delay := seconds * time.Second
		return &Error{Code: codes.ResourceExhausted, RetryAfter: &delay}
	}
	soon, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	retry := Retry{Attempts: 5, Longest: time.Minute}
	for name, one := range map[string]struct {
		ctx     context.Context
		failure *Error
		attempt int
		again   bool
	}{
		"waits":             {context.Background(), after(2), 0, true},
		"no more attempts":  {context.Background(), after(2), 5, false},
		"too long":          {context.Background(), after(61), 0, false},
		"past the deadline": {soon, after(2), 0, false},
		"no delay":          {context.Background(), &Error{Code: codes.ResourceExhausted}, 0, false},
		"another code":      {context.Background(), &Error{Code: codes.Internal, RetryAfter: after(2).RetryAfter}, 0, false},
	} {
		pause, again := retry.pause(one.ctx, one.failure, one.attempt)
		if again != one.again {
			t.Errorf("%s: again is %v", name, again)
		}
		if again && (pause < 2*time.Second || pause > 2200*time.Millisecond) {
			t.Errorf("%s: pause is %v", name, pause)
		}
	}
	if _, again := (Retry{}).pause(context.Background(), after(2), 0); again {
		t.Error("no attempts: off")
	}
}

func TestReconnectDelayGrowsToItsLimit(t *testing.T) {
	reconnect := Reconnect{Attempts: 8, FirstDelay: 200 * time.Millisecond, LongestDelay: 5 * time.Second}
	for attempt, full := range []time.Duration{200, 400, 800, 1600, 3200, 5000, 5000} {
		full *= time.Millisecond
		if delay := reconnect.delay(attempt); delay < full/2 || delay > full {
			t.Errorf("attempt %d: %v", attempt, delay)
		}
	}
}
