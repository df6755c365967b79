package omnigrpc

import (
	"context"
	"math"
	"math/rand"
	"time"

	"google.golang.org/grpc/codes"
)

// Reconnect says how a lost stream is resumed. After Attempts in a row without a message, an Error with the reason
// STREAM_LOST is returned.
type Reconnect struct {
	Attempts     int
	FirstDelay   time.Duration
	LongestDelay time.Duration
}

// delay before an attempt, from 0: half of it is random, so that the clients of a server do not all come at once.
func (r Reconnect) delay(attempt int) time.Duration {
	full := float64(r.FirstDelay) * math.Pow(2, float64(attempt))
	return time.Duration(math.Min(full, float64(r.LongestDelay)) * (0.5 + share()/2))
}

// share is a random number below 1. Before Go 1.20 the generator that math/rand shares starts the same in every process.
func share() float64 { return rand.New(rand.NewSource(time.Now().UnixNano())).Float64() }

// Retry says how a call is repeated that the server has no room for now (RESOURCE_EXHAUSTED with RetryInfo): after as
// long as the server says, at most Attempts times, and not where that is longer than Longest or than the context lasts.
// Attempts 0 turns it off.
type Retry struct {
	Attempts int
	Longest  time.Duration
}

// pause until the call is made again, up to a tenth more than the server says; false where it is not.
func (r Retry) pause(ctx context.Context, failure *Error, attempt int) (time.Duration, bool) {
	if failure.Code != codes.ResourceExhausted || failure.RetryAfter == nil || attempt >= r.Attempts {
		return 0, false
	}
	pause := time.Duration(float64(*failure.RetryAfter) * (1 + share()/10))
	if *failure.RetryAfter > r.Longest {
		return 0, false
	}
	if end, ok := ctx.Deadline(); ok && time.Until(end) < pause {
		return 0, false
	}
	return pause, true
}

const (
	connectAttempts = 4
	connectFor      = 5 * time.Second
)

// calls counts what one method has tried.
type calls struct {
	client *Client
	began  time.Time
	// unreachable and full count the attempts that ended for each reason.
	unreachable, full int
}

func (c *Client) newCalls() *calls { return &calls{client: c, began: time.Now()} }

// again waits and returns nil where a call that got no message is to be repeated, else the error to return. That is
// safe for every rpc: those that make a job carry a request_id, the others only read or are idempotent.
func (t *calls) again(ctx context.Context, err error) error {
	failure := fromCall(err, t.client.address)
	if ctx.Err() != nil {
		return failure
	}
	pause, ok := t.client.retry.pause(ctx, failure, t.full)
	if ok {
		t.full++
	} else {
		early := t.unreachable+1 < connectAttempts || time.Since(t.began) < connectFor
		if failure.Code != codes.Unavailable || !early {
			return failure
		}
		pause = t.client.connect.delay(t.unreachable)
		t.unreachable++
	}
	if err := sleep(ctx, pause); err != nil {
		return fromCall(err, t.client.address)
	}
	return nil
}

// unary makes a call until it is answered.
func (c *Client) unary(ctx context.Context, call func(context.Context) error) error {
	tried := c.newCalls()
	for {
		err := call(ctx)
		if err == nil {
			return nil
		}
		if err = tried.again(ctx, err); err != nil {
			return err
		}
	}
}

func sleep(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
