package omnigrpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

type security struct {
	tls       bool
	ca        string
	cert, key string
	token     TokenFunc
	fixed     *string
	insecure  bool
}

// WithCA turns TLS on, and trusts the authorities of a PEM file alone.
func WithCA(file string) ClientOption { return func(s *clientSettings) { s.security.ca = file } }

// WithTLS turns TLS on, with the authorities that the system trusts unless WithCA names others.
func WithTLS() ClientOption { return func(s *clientSettings) { s.security.tls = true } }

// WithClientCert is this client's own certificate and its key, both PEM files; it turns TLS on.
func WithClientCert(certFile, keyFile string) ClientOption {
	return func(s *clientSettings) { s.security.cert, s.security.key = certFile, keyFile }
}

// WithToken sends a token with every call. It goes to another machine over TLS alone.
func WithToken(token string) ClientOption {
	return func(s *clientSettings) {
		s.security.fixed = &token
		s.security.token = func(context.Context) (string, error) { return token, nil }
	}
}

// WithTokenFunc asks for the token at every call.
func WithTokenFunc(token TokenFunc) ClientOption {
	return func(s *clientSettings) { s.security.token, s.security.fixed = token, nil }
}

// WithInsecureToken sends the token to another machine without TLS, too, where anybody on the way can take it.
func WithInsecureToken() ClientOption { return func(s *clientSettings) { s.security.insecure = true } }

// check gives the TLS settings, nil for plain text.
func (s *security) check(address string) (*tls.Config, error) {
	on := s.tls || s.ca != "" || s.cert != "" || s.key != ""
	if on && isUnix(address) {
		return nil, refused("tls", address+" is a Unix socket, which is never encrypted")
	}
	if s.token != nil && !on && !s.insecure && !isLocal(address) {
		found := refused("token", "it would go to "+address+" unencrypted, where anybody on the way can take it: use "+
			"WithCA or WithTLS, or WithInsecureToken")
		found.Reason = "TOKEN_NEEDS_TLS"
		return nil, found
	}
	if s.fixed != nil {
		if err := checkToken(*s.fixed); err != nil {
			return nil, err
		}
	}
	if !on {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if s.ca != "" {
		data, err := os.ReadFile(s.ca)
		if err != nil {
			return nil, refused("ca", err.Error())
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(data) {
			return nil, refused("ca", s.ca+" has no certificates in PEM")
		}
	}
	if s.cert != "" || s.key != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			return nil, refused("key", err.Error())
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// bearer sends a token. That it does not leave the machine in plain text was checked when the client was made.
type bearer TokenFunc

func (b bearer) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token, err := b(ctx)
	if err != nil {
		return nil, status.Errorf(codes.Unauthenticated, "the function that gives the token failed: %v", err)
	}
	token = strings.TrimSpace(token)
	if err := checkToken(token); err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Message)
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// checkToken refuses what is no token, without showing it.
func checkToken(token string) *Error {
	token = strings.TrimSpace(token)
	for _, letter := range token {
		if letter <= ' ' || letter > '~' {
			token = ""
			break
		}
	}
	if token == "" {
		return refused("token", "it is empty, or has characters that no token has (spaces, line ends)")
	}
	return nil
}

func isUnix(address string) bool {
	return strings.HasPrefix(address, "unix:") || strings.HasPrefix(address, "unix-abstract:")
}

func isLocal(address string) bool {
	if isUnix(address) {
		return true
	}
	host, _, err := net.SplitHostPort(withoutScheme(address))
	if err != nil {
		return false
	}
	if strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

func withoutScheme(address string) string {
	for _, scheme := range []string{"dns:", "passthrough:"} {
		if strings.HasPrefix(address, scheme) {
			return address[strings.LastIndexByte(address, '/')+1:]
		}
	}
	return address
}

// checkAddress refuses what gRPC would take for something else.
func checkAddress(address string) error {
	if isUnix(address) {
		return nil
	}
	host, port, err := net.SplitHostPort(withoutScheme(address))
	number, bad := strconv.ParseUint(port, 10, 16)
	if err != nil || bad != nil || host == "" || number == 0 || strings.Contains(host, "/") {
		return refused("address", strconv.Quote(address)+" is not HOST:PORT, [IPV6]:PORT or unix:/path")
	}
	return nil
}
