package omnigrpc

import (
	"fmt"
	"strings"
	"time"

	legacy "github.com/golang/protobuf/proto"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
)

// Violation is one field of a request that breaks a rule.
type Violation struct {
	// Field is a path such as "sampling.steps".
	Field string
	// Description says which rule, and the nearest value that is allowed.
	Description string
}

// Error is what every method of this package returns where it fails; get it with errors.As.
type Error struct {
	// Code is the gRPC code.
	Code codes.Code
	// Reason is a stable UPPER_SNAKE name that programs may branch on.
	Reason string
	// Message is for people.
	Message string
	// Violations are the fields that break rules.
	Violations []Violation
	// RetryAfter is when the server wants to be asked again; nil where it does not say.
	RetryAfter *time.Duration
	// Metadata is that of ErrorInfo.
	Metadata map[string]string
	// JobID is the job that ended so, or that was being followed; empty where there is none.
	JobID string

	fromServer bool
	cause      error
}

// Error gives code, reason and message in one line.
func (e *Error) Error() string {
	name := CodeName(e.Code)
	if e.Reason != "" && e.Reason != name {
		name += " " + e.Reason
	}
	return name + ": " + e.Message
}

// Unwrap gives context.Canceled or context.DeadlineExceeded where a context ended the call.
func (e *Error) Unwrap() error { return e.cause }

// CodeName is a code as the API documents it, for example "INVALID_ARGUMENT".
func CodeName(code codes.Code) string {
	if code == codes.Canceled {
		return "CANCELLED"
	}
	if code == codes.OK {
		return "OK"
	}
	var name strings.Builder
	for i, letter := range code.String() {
		if i > 0 && letter >= 'A' && letter <= 'Z' {
			name.WriteByte('_')
		}
		name.WriteRune(letter)
	}
	return strings.ToUpper(name.String())
}

func refused(field, message string) *Error {
	return &Error{
		Code: codes.InvalidArgument, Reason: "INVALID_ARGUMENT", Message: field + ": " + message,
		Violations: []Violation{{Field: field, Description: message}},
	}
}

// fromStatus decodes a status. Details of kinds that are not known here are passed over.
func fromStatus(from *rpcstatus.Status) *Error {
	code := codes.Code(from.GetCode())
	found := &Error{Code: code, Reason: CodeName(code), Message: from.GetMessage(), Metadata: map[string]string{}}
	for _, detail := range from.GetDetails() {
		found.fromServer = true
		if err := found.add(detail.GetTypeUrl(), detail.GetValue()); err != nil {
			found.Message += fmt.Sprintf(" (a detail of this error cannot be read: %v)", err)
		}
	}
	found.JobID = found.Metadata["job_id"]
	return found
}

func (e *Error) add(typeURL string, value []byte) error {
	switch typeURL[strings.LastIndexByte(typeURL, '/')+1:] {
	case "google.rpc.ErrorInfo":
		var info errdetails.ErrorInfo
		if err := legacy.Unmarshal(value, &info); err != nil {
			return err
		}
		if info.Reason != "" {
			e.Reason = info.Reason
		}
		for key, text := range info.Metadata {
			e.Metadata[key] = text
		}
	case "google.rpc.BadRequest":
		var bad errdetails.BadRequest
		if err := legacy.Unmarshal(value, &bad); err != nil {
			return err
		}
		for _, one := range bad.FieldViolations {
			e.Violations = append(e.Violations, Violation{one.GetField(), one.GetDescription()})
		}
	case "google.rpc.RetryInfo":
		var retry errdetails.RetryInfo
		if err := legacy.Unmarshal(value, &retry); err != nil {
			return err
		}
		delay := time.Duration(retry.GetRetryDelay().GetSeconds())*time.Second +
			time.Duration(retry.GetRetryDelay().GetNanos())
		e.RetryAfter = &delay
	}
	return nil
}
