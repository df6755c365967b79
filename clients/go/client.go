// Package omnigrpc is a client of omni_grpc, a server for diffusion models.
//
// Requests are made by Image, Edit, Video and Audio, and given to Client.Generate, which waits for the outputs,
// Client.Stream, which gives the events of the job as they come, or Client.CreateJob, whose job outlives the client.
// Cancelling the context of Generate or Stream cancels the job on the server.
package omnigrpc

import (
	"context"
	"crypto/tls"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	v1 "github.com/omni-grpc/omni_grpc/clients/go/v1"
)

// TokenFunc gives the token to send; it is asked at every call, so that a token may be renewed.
type TokenFunc func(context.Context) (string, error)

// Client is one connection to a server. It may be used by many goroutines.
type Client struct {
	address   string
	conn      *grpc.ClientConn
	reconnect Reconnect
	connect   Reconnect
	retry     Retry

	generation v1.GenerationServiceClient
	jobs       v1.JobServiceClient
	artifacts  v1.ArtifactServiceClient
	models     v1.ModelServiceClient
}

// ClientOption changes how a Client is made.
type ClientOption func(*clientSettings)

type clientSettings struct {
	security  security
	reconnect Reconnect
	retry     Retry
	dial      []grpc.DialOption
}

// WithReconnect changes how lost streams are resumed.
func WithReconnect(reconnect Reconnect) ClientOption {
	return func(s *clientSettings) { s.reconnect = reconnect }
}

// WithRetry changes how a server without room is asked again.
func WithRetry(retry Retry) ClientOption { return func(s *clientSettings) { s.retry = retry } }

// WithDialOptions adds options of gRPC, interceptors for example.
func WithDialOptions(options ...grpc.DialOption) ClientOption {
	return func(s *clientSettings) { s.dial = append(s.dial, options...) }
}

// NewClient makes a client of the server at HOST:PORT, [IPV6]:PORT or unix:/path. It connects at the first call. What
// is wrong with the options is an *Error that names the field.
func NewClient(address string, options ...ClientOption) (*Client, error) {
	settings := clientSettings{
		reconnect: Reconnect{Attempts: 8, FirstDelay: 200 * time.Millisecond, LongestDelay: 5 * time.Second},
		retry:     Retry{Attempts: 5, Longest: time.Minute},
	}
	for _, option := range options {
		option(&settings)
	}
	if err := checkAddress(address); err != nil {
		return nil, err
	}
	config, err := settings.security.check(address)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.Dial(address, append(dialOptions(config, settings.security.token), settings.dial...)...)
	if err != nil {
		return nil, refused("address", err.Error())
	}
	return &Client{
		address: address, conn: conn, reconnect: settings.reconnect, retry: settings.retry,
		connect:    Reconnect{FirstDelay: 200 * time.Millisecond, LongestDelay: 2 * time.Second},
		generation: v1.NewGenerationServiceClient(conn), jobs: v1.NewJobServiceClient(conn),
		artifacts: v1.NewArtifactServiceClient(conn), models: v1.NewModelServiceClient(conn),
	}, nil
}

// Close ends the connection, and with it every call.
func (c *Client) Close() error { return c.conn.Close() }

func dialOptions(config *tls.Config, token TokenFunc) []grpc.DialOption {
	backoffs := backoff.DefaultConfig
	backoffs.BaseDelay = 200 * time.Millisecond
	// by default it grows to two minutes, longer than a job waits for its client to come back
	backoffs.MaxDelay = 2 * time.Second
	options := []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{}), grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffs, MinConnectTimeout: 5 * time.Second}),
		// a peer that vanished is noticed within 40 s
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	}
	if config == nil {
		options = append(options, grpc.WithInsecure())
	} else {
		options = append(options, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	}
	if token != nil {
		options = append(options, grpc.WithPerRPCCredentials(bearer(token)))
	}
	return options
}
