// Command deephealth is an MCP server that says itself when it cannot work: it keeps
// notes in a SQLite database, and while that is locked, GET /health is a 503. Its
// tools do not fail yet, for they wait for the lock; but a proxy that reads /health
// (health_path) has stopped to send it calls by then.
//
//	go run . -db notes.db &              # the server
//	go run . -db notes.db -lock 20s      # locks its database, as a stuck backup would
//	curl -i http://127.0.0.1:9001/health
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/mcphealth/mcphealth/deephealth"
	"github.com/modelcontextprotocol/go-sdk/mcp"
	_ "modernc.org/sqlite"
)

const (
	// waitForLock is how long a tool waits for the database: longer than /health is
	// cached, so that nobody is sent here any more before a call fails.
	waitForLock = 30 * time.Second
	// drainFor is how long the server says that it drains before it ends, for proxies
	// to hear of it.
	drainFor = 10 * time.Second
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9001", "address to listen on")
	name := flag.String("name", "notes", "server name, which each answer tells")
	file := flag.String("db", "notes.db", "the database")
	cache := flag.Duration("cache", deephealth.DefaultCache, "how long /health is cached")
	drain := flag.Duration("drain", drainFor, "how long to drain after SIGTERM")
	lock := flag.Duration("lock", 0, "only lock the database for this long, and serve nothing")
	flag.Parse()
	db, err := open(*file)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if *lock > 0 {
		err = hold(db, *lock)
	} else {
		err = serve(*listen, *name, db, *cache, *drain)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func open(file string) (*sql.DB, error) {
	db, err := sql.Open("sqlite", fmt.Sprintf("file:%s?_pragma=busy_timeout(%d)&_txlock=immediate", file, waitForLock.Milliseconds()))
	if err == nil {
		_, err = db.Exec("CREATE TABLE IF NOT EXISTS notes (text TEXT)")
	}
	return db, err
}

// hold locks the database for a while.
func hold(db *sql.DB, d time.Duration) error {
	c, err := db.Conn(context.Background())
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.ExecContext(context.Background(), "BEGIN EXCLUSIVE"); err != nil {
		return err
	}
	fmt.Println("locked")
	time.Sleep(d)
	_, err = c.ExecContext(context.Background(), "ROLLBACK")
	return err
}

// writable asks the database whether a tool could write now, and writes nothing. It
// has a connection of its own, which does not wait for a lock as long as tools do.
func writable(c *sql.Conn) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := c.ExecContext(ctx, "BEGIN IMMEDIATE")
		// After an error, too: the lock may have come in the moment in which ctx ended.
		_, over := c.ExecContext(context.WithoutCancel(ctx), "ROLLBACK")
		if err != nil {
			return err
		}
		return over
	}
}

func serve(listen, name string, db *sql.DB, cache, drain time.Duration) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	c, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	// Other writers hold the lock for some milliseconds, and that is no fault.
	if _, err := c.ExecContext(ctx, "PRAGMA busy_timeout = 150"); err != nil {
		return err
	}
	health, err := deephealth.New(deephealth.Options{Cache: cache, Logger: slog.Default()},
		deephealth.Check{Name: "database", Timeout: 200 * time.Millisecond, Run: writable(c)})
	if err != nil {
		return err
	}
	server := mcp.NewServer(&mcp.Implementation{Name: name, Version: "1"}, nil)
	mcp.AddTool(server, &mcp.Tool{Name: "note", Description: "keeps a note"}, note(name, db))

	mux := http.NewServeMux()
	mux.Handle("/mcp", mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server },
		&mcp.StreamableHTTPOptions{Stateless: true, JSONResponse: true}))
	mux.Handle("/health", health)
	ln, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends it at once
		health.SetDraining(true)
		time.Sleep(drain)
		last, cancel := context.WithTimeout(context.Background(), waitForLock)
		defer cancel()
		ended <- srv.Shutdown(last)
	}()
	fmt.Printf("%s: http://%s/mcp\n", name, ln.Addr())
	if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-ended
}

type noteArgs struct {
	Text string `json:"text" jsonschema:"what to remember"`
}

func note(name string, db *sql.DB) mcp.ToolHandlerFor[noteArgs, any] {
	return func(ctx context.Context, _ *mcp.CallToolRequest, in noteArgs) (*mcp.CallToolResult, any, error) {
		if _, err := db.ExecContext(ctx, "INSERT INTO notes VALUES (?)", in.Text); err != nil {
			return nil, nil, fmt.Errorf("keeping the note: %w", err)
		}
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: name}}}, nil, nil
	}
}
