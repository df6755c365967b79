package omnigrpc

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// fromCall decodes how a call ended. An *Error is returned as it is.
func fromCall(err error, address string) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		err = status.FromContextError(err).Err()
	}
	decoded, _ := status.FromError(err)
	found := fromStatus(decoded.Proto())
	if found.fromServer {
		return found
	}
	switch found.Code {
	case codes.Unavailable:
		found.Reason = "SERVER_UNREACHABLE"
		found.Message = "cannot reach the server at " + address + ": " + found.Message
	case codes.DeadlineExceeded:
		found.Reason = "CALL_DEADLINE"
		found.Message = "the server at " + address + " did not answer before the deadline of the call"
		found.cause = context.DeadlineExceeded
	case codes.Canceled:
		found.Reason = "CALL_CANCELLED"
		found.cause = context.Canceled
	}
	return found
}

// lost tells that the connection went away, so that the job may still run. A reset stream is INTERNAL without details.
func (e *Error) lost() bool {
	return e.Code == codes.Unavailable || (e.Code == codes.Internal && !e.fromServer && e.Reason == "INTERNAL")
}

// timedOut tells that a deadline of this side passed.
func (e *Error) timedOut() bool { return e.Code == codes.DeadlineExceeded && !e.fromServer }

// with is a copy that says more of where it happened.
func (e *Error) with(jobID, message string) *Error {
	changed := *e
	changed.JobID = jobID
	changed.Message = message
	return &changed
}
