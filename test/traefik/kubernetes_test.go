package traefik

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"gopkg.in/yaml.v3"
)

// kube answers as a Kubernetes API server does that has these objects: lists, and
// watches that tell of changes. It is all that Traefik's provider asks for.
type kube struct {
	mu       sync.Mutex
	objects  map[string][]map[string]any // by resource, as in ingressroutes
	watchers map[string][]chan string
}

// kinds are those of the resources that Traefik's provider lists.
var kinds = map[string]string{"middlewares": "Middleware", "middlewaretcps": "MiddlewareTCP", "ingressroutes": "IngressRoute",
	"ingressroutetcps": "IngressRouteTCP", "ingressrouteudps": "IngressRouteUDP", "tlsoptions": "TLSOption", "tlsstores": "TLSStore",
	"traefikservices": "TraefikService", "serverstransports": "ServersTransport", "serverstransporttcps": "ServersTransportTCP",
	"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node", "secrets": "Secret", "configmaps": "ConfigMap", "namespaces": "Namespace"}

func (k *kube) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	resource := parts[len(parts)-1]
	group := "v1"
	if parts[0] == "apis" && len(parts) > 2 {
		group = parts[1] + "/" + parts[2]
	}
	w.Header().Set("Content-Type", "application/json")
	if r.URL.Query().Get("watch") == "" {
		k.mu.Lock()
		defer k.mu.Unlock()
		items := k.objects[resource]
		if items == nil {
			items = []map[string]any{}
		}
		json.NewEncoder(w).Encode(map[string]any{"kind": kinds[resource] + "List", "apiVersion": group, "metadata": map[string]any{"resourceVersion": "1"}, "items": items})
		return
	}
	if r.URL.Query().Get("sendInitialEvents") != "" {
		w.WriteHeader(http.StatusBadRequest) // as a server that is older than that
		io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"BadRequest","code":400}`)
		return
	}
	box := make(chan string, 10)
	k.mu.Lock()
	k.watchers[resource] = append(k.watchers[resource], box)
	k.mu.Unlock()
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		select {
		case event := <-box:
			io.WriteString(w, event+"\n")
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

// change replaces the only object of a resource, and tells who watches.
func (k *kube) change(resource string, object map[string]any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.objects[resource] = []map[string]any{object}
	event, _ := json.Marshal(map[string]any{"type": "MODIFIED", "object": object})
	for _, box := range k.watchers[resource] {
		box <- string(event)
	}
}

func meta(name, version string, more ...any) map[string]any {
	m := map[string]any{"name": name, "namespace": "default", "uid": name, "resourceVersion": version}
	for i := 0; i < len(more); i += 2 {
		m[more[i].(string)] = more[i+1]
	}
	return m
}

// slice are the endpoints of the Service app; none without a port.
func slice(version string, port int) map[string]any {
	endpoints := []any{}
	if port != 0 {
		endpoints = append(endpoints, map[string]any{"addresses": []string{"127.0.0.1"}, "conditions": map[string]any{"ready": true, "serving": true}})
	}
	return map[string]any{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
		"metadata":  meta("app-1", version, "labels", map[string]any{"kubernetes.io/service-name": "app"}),
		"endpoints": endpoints, "ports": []any{map[string]any{"name": "http", "port": port, "protocol": "TCP"}}}
}

// kubernetes.yml as it is, but for the host, in Traefik's own Kubernetes provider: its Middleware and both
// IngressRoutes. While the Service has no endpoints, calls wait.
func TestKubernetesExample(t *testing.T) {
	k := &kube{objects: map[string][]map[string]any{}, watchers: map[string][]chan string{}}
	dec := yaml.NewDecoder(strings.NewReader(strings.ReplaceAll(read(t, "examples/traefik/kubernetes.yml"), "mcp.example.com", "127.0.0.1")))
	for {
		var object map[string]any
		if err := dec.Decode(&object); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		object["metadata"] = meta(object["metadata"].(map[string]any)["name"].(string), "1")
		resource := strings.ToLower(object["kind"].(string)) + "s"
		k.objects[resource] = append(k.objects[resource], object)
	}
	if len(k.objects["middlewares"]) != 1 || len(k.objects["ingressroutes"]) != 2 {
		t.Fatalf("objects %v", k.objects)
	}
	server := e2e.Get(t, "go-sdk-v1.8.0-stateless-json").Start(t, e2e.FreePort(t))
	var port int
	fmt.Sscanf(server.Addr, "127.0.0.1:%d", &port)
	k.objects["services"] = []map[string]any{{"apiVersion": "v1", "kind": "Service", "metadata": meta("app", "1"),
		"spec": map[string]any{"type": "ClusterIP", "clusterIP": "10.0.0.1", "ports": []any{map[string]any{"name": "http", "port": 8000, "targetPort": port}}}}}
	k.objects["endpointslices"] = []map[string]any{slice("1", port)}
	api := httptest.NewServer(k)
	defer api.CloseClientConnections()
	tr := Start(t, Options{Flags: []string{"--providers.kubernetescrd=true", "--providers.kubernetescrd.endpoint=" + api.URL, "--providers.kubernetescrd.token=x"}})
	load := func() *e2e.Running {
		return e2e.Load{URL: tr.URL + "/mcp", Clients: 5, Rate: 5}.Start(t)
	}
	await(t, 20*time.Second, "served", func() bool {
		l := load()
		time.Sleep(100 * time.Millisecond)
		r := l.Stop()
		return r.Count[e2e.OK] > 0 && len(r.Failures) == 0
	})
	running := load()
	time.Sleep(time.Second)
	k.change("endpointslices", slice("2", 0))
	time.Sleep(2 * time.Second)
	k.change("endpointslices", slice("3", port))
	time.Sleep(3 * time.Second)
	rep := running.Stop()
	t.Log(rep)
	if len(rep.Failures) > 0 || rep.Slowest < time.Second {
		t.Errorf("%v: want calls that waited, and none that failed", rep)
	}
}
