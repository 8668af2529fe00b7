package octavo

import (
	"context"
	"crypto/tls"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	octavov1 "octavo/v1"
)

// DefaultAddress is where `octavo serve` serves gRPC.
const DefaultAddress = "127.0.0.1:50051"

var (
	tcpAddress = regexp.MustCompile(`^(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})$`)
	ourAddress = regexp.MustCompile(`^(unix:|localhost:|127\.|\[::1\])`)
)

type options struct {
	apiKey        string
	tls           *tls.Config
	resumeTimeout time.Duration
	waitForServer bool
	dialOptions   []grpc.DialOption
}

// Option changes how a Client reaches its server.
type Option func(*options)

// WithAPIKey sends a key with every call. Without WithTLS it can be read on the way.
func WithAPIKey(key string) Option {
	return func(o *options) { o.apiKey = key }
}

// WithTLS encrypts, and checks the server's certificate as the configuration says.
func WithTLS(config *tls.Config) Option {
	return func(o *options) { o.tls = config }
}

// WithResumeTimeout says how long a generation whose server went away looks for it before it fails: a minute unless set;
// 0 fails at once.
func WithResumeTimeout(timeout time.Duration) Option {
	return func(o *options) { o.resumeTimeout = timeout }
}

// WithWaitForServer makes a generation that cannot be sent at first wait in the same way.
func WithWaitForServer() Option {
	return func(o *options) { o.waitForServer = true }
}

// WithDialOptions adds options of the connection.
func WithDialOptions(added ...grpc.DialOption) Option {
	return func(o *options) { o.dialOptions = append(o.dialOptions, added...) }
}

// Client calls a running server. Its methods may be called from several goroutines, and return an *Error where the server
// or the way to it fails.
type Client struct {
	// Inference and Admin are the contract's calls as they are. Client's own methods add the API key, typed errors and
	// resumption to them; use Context for the key.
	Inference octavov1.InferenceServiceClient
	Admin     octavov1.AdminServiceClient

	address    string
	connection *grpc.ClientConn
	options    options
}

// NewClient makes a client of the server at its gRPC address: HOST:PORT or unix:PATH. The connection is made with the
// first call, and again after it breaks.
func NewClient(address string, settings ...Option) (*Client, error) {
	chosen := options{resumeTimeout: defaultResumeTimeout}
	for _, set := range settings {
		set(&chosen)
	}
	if err := checkAddress(address); err != nil {
		return nil, err
	}
	connection, err := grpc.Dial(address, dialOptions(address, &chosen)...)
	if err != nil {
		return nil, err
	}
	return &Client{
		Inference:  octavov1.NewInferenceServiceClient(connection),
		Admin:      octavov1.NewAdminServiceClient(connection),
		address:    address,
		connection: connection,
		options:    chosen,
	}, nil
}

// Close closes the connection; running requests are cancelled.
func (c *Client) Close() error {
	return c.connection.Close()
}

// Context is the context with the client's API key, for calls of Inference and Admin.
func (c *Client) Context(ctx context.Context) context.Context {
	if c.options.apiKey == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.options.apiKey)
}

// Stream generates, and gives what is new as it comes. The request is sent with the first Next.
func (c *Client) Stream(ctx context.Context, request *octavov1.GenerateRequest) *Stream {
	return c.start(ctx, request, false)
}

// Generate generates to the end.
func (c *Client) Generate(ctx context.Context, request *octavov1.GenerateRequest) (Output, error) {
	stream := c.start(ctx, request, true)
	defer stream.Close()
	for stream.Next() {
	}
	return stream.Output(), stream.Err()
}

// Tokenize turns text or a conversation into token ids.
func (c *Client) Tokenize(ctx context.Context, request *octavov1.TokenizeRequest) (*octavov1.TokenizeResponse, error) {
	response, err := c.Inference.Tokenize(c.Context(ctx), request)
	return response, c.typed(err)
}

// Detokenize turns token ids into text.
func (c *Client) Detokenize(ctx context.Context, request *octavov1.DetokenizeRequest) (string, error) {
	response, err := c.Inference.Detokenize(c.Context(ctx), request)
	return response.GetText(), c.typed(err)
}

// ListModels lists the served models.
func (c *Client) ListModels(ctx context.Context) ([]*octavov1.Model, error) {
	response, err := c.Inference.ListModels(c.Context(ctx), &octavov1.ListModelsRequest{})
	return response.GetModels(), c.typed(err)
}

// State tells what the router's workers, queues and KV pools hold now.
func (c *Client) State(ctx context.Context) (*octavov1.GetStateResponse, error) {
	response, err := c.Admin.GetState(c.Context(ctx), &octavov1.GetStateRequest{})
	return response, c.typed(err)
}

func (c *Client) start(ctx context.Context, request *octavov1.GenerateRequest, finalOnly bool) *Stream {
	request = prepared(request, finalOnly)
	builder := newOutputBuilder(request)
	ctx, cancel := context.WithCancel(c.Context(ctx))
	return &Stream{
		ctx:        ctx,
		cancel:     cancel,
		address:    c.address,
		builder:    builder,
		resumption: newResumption(request, builder, &c.options),
		open: func(
			ctx context.Context, request *octavov1.GenerateRequest,
		) (octavov1.InferenceService_GenerateClient, error) {
			return c.Inference.Generate(ctx, request)
		},
	}
}

func (c *Client) typed(err error) error {
	if err == nil {
		return nil
	}
	return errorOf(err, c.address)
}

// prepared is the message to send, a copy. A resume needs the prompt's token ids, so they are asked for where they are not
// given.
func prepared(request *octavov1.GenerateRequest, finalOnly bool) *octavov1.GenerateRequest {
	request = proto.Clone(request).(*octavov1.GenerateRequest)
	if request.Output == nil {
		request.Output = &octavov1.OutputOptions{}
	}
	request.Output.FinalOnly = finalOnly
	request.Output.ReturnPromptTokenIds = request.GetTokenIds() == nil
	return request
}

func checkAddress(address string) error {
	if strings.HasPrefix(address, "unix:") && len(address) > len("unix:") {
		return nil
	}
	if match := tcpAddress.FindStringSubmatch(address); match != nil {
		if port, err := strconv.Atoi(match[1]); err == nil && 0 < port && port < 65536 {
			return nil
		}
	}
	return fmt.Errorf(
		"address is %q; it must be the server's gRPC address, HOST:PORT or unix:PATH, such as %s", address, DefaultAddress)
}

// dialOptions keep an idle or long stream alive, reconnect quickly, and leave the limit on messages to the server.
func dialOptions(address string, chosen *options) []grpc.DialOption {
	reconnection := backoff.DefaultConfig
	reconnection.BaseDelay, reconnection.MaxDelay = 100*time.Millisecond, time.Second
	set := []grpc.DialOption{
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnection, MinConnectTimeout: 5 * time.Second}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)),
	}
	if ourAddress.MatchString(address) {
		set = append(set, grpc.WithNoProxy()) // a proxy from the environment is not for this machine's addresses
	}
	if chosen.tls != nil {
		set = append(set, grpc.WithTransportCredentials(credentials.NewTLS(chosen.tls)))
	} else {
		set = append(set, grpc.WithInsecure()) // deprecated by newer versions, and the one way that all of them have
	}
	return append(set, chosen.dialOptions...)
}
