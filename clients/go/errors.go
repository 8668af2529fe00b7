package octavo

import (
	"fmt"
	"regexp"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	errorDomain       = "octavo.v1"
	defaultRetryAfter = time.Second
)

// Error is a call that failed. Its message is written for people: it names the value and the remedy.
type Error struct {
	// Code is the canonical gRPC code.
	Code codes.Code
	// Message is the server's.
	Message string
	// Reason is google.rpc.ErrorInfo.reason, such as "CONTEXT_LENGTH_EXCEEDED". Empty: the error is not the server's own.
	Reason string
	// Field is the field of the request that is wrong, such as "sampling.temperature". Empty: none.
	Field string
	// RetryAfter is when another try makes sense, where a queue was full. 0: another error.
	RetryAfter time.Duration
}

func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", e.Code, e.Message)
}

// GRPCStatus lets the functions of package status see the code.
func (e *Error) GRPCStatus() *status.Status {
	return status.New(e.Code, e.Message)
}

var resetStream = regexp.MustCompile(`RST_STREAM|connection reset|EOF`)

// errorOf is the Error for a call to the address that failed.
func errorOf(err error, address string) *Error {
	state := status.Convert(err)
	found := &Error{Code: state.Code(), Message: state.Message()}
	for _, detail := range state.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == errorDomain {
				found.Reason = detail.GetReason()
				if found.Field == "" {
					found.Field = detail.GetMetadata()["field"]
				}
			}
		case *errdetails.BadRequest:
			if violations := detail.GetFieldViolations(); len(violations) > 0 {
				found.Field = violations[0].GetField()
			}
		case *errdetails.RetryInfo:
			if delay := detail.GetRetryDelay(); delay != nil {
				found.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
			}
		}
	}
	if found.Reason == "OVERLOADED" && found.RetryAfter == 0 {
		found.RetryAfter = defaultRetryAfter
	}
	if found.Reason == "" && isLostConnection(found) {
		found.Code = codes.Unavailable
		found.Message = fmt.Sprintf(
			"cannot reach an Octavo server at %s: is `octavo serve` running there? (%s)", address, found.Message)
	}
	return found
}

// isLostConnection tells a connection that broke: UNAVAILABLE, or INTERNAL and a reset stream.
func isLostConnection(err *Error) bool {
	return err.Code == codes.Unavailable || err.Code == codes.Internal && resetStream.MatchString(err.Message)
}
