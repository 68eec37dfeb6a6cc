package operations

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// manifest is one object of a file, as JSON.
type manifest struct {
	Kind, APIVersion string
	raw              []byte
}

func manifests(t *testing.T, file string) (all []manifest) {
	t.Helper()
	for i, text := range strings.Split(example(t, file), "\n---\n") {
		raw, err := yaml.YAMLToJSONStrict([]byte(text))
		if err != nil {
			t.Fatalf("%s, document %d: %v", file, i+1, err)
		}
		m := manifest{raw: raw}
		if err := json.Unmarshal(raw, &m); err != nil || m.Kind == "" {
			t.Fatalf("%s, document %d: %v, kind %q", file, i+1, err, m.Kind)
		}
		all = append(all, m)
	}
	return all
}

// strict decodes as the API server does with fieldValidation=Strict.
func (m manifest) strict(t *testing.T, to any) {
	t.Helper()
	strict, err := kjson.UnmarshalStrict(m.raw, to)
	if err != nil || len(strict) > 0 {
		t.Errorf("%s: %v %v", m.Kind, err, strict)
	}
}

// The manifests are what Kubernetes' API takes, their parts fit each other, and what
// the kubelet would run and ask does what it should.
func TestKubernetes(t *testing.T) {
	for _, file := range []string{"exec.yaml", "sidecar.yaml", "deephealth.yaml"} {
		t.Run(file, func(t *testing.T) {
			var d appsv1.Deployment
			for _, m := range manifests(t, "kubernetes/"+file) {
				switch m.APIVersion + " " + m.Kind {
				case "apps/v1 Deployment":
					m.strict(t, &d)
				case "v1 Service":
					var s corev1.Service
					m.strict(t, &s)
					if s.Spec.Selector["app"] != d.Spec.Template.Labels["app"] || s.Spec.Ports[0].TargetPort.StrVal != d.Spec.Template.Spec.Containers[0].Ports[0].Name {
						t.Errorf("the service does not lead to the deployment: %+v", s.Spec)
					}
				default:
					t.Errorf("%s %s: this test knows no such kind", m.APIVersion, m.Kind)
				}
			}
			pod := d.Spec.Template.Spec
			if d.Name == "" || d.Spec.Selector.MatchLabels["app"] == "" || d.Spec.Selector.MatchLabels["app"] != d.Spec.Template.Labels["app"] || len(pod.Containers) != 1 {
				t.Fatalf("%+v", d)
			}
			sidecar := ""
			for _, c := range pod.InitContainers {
				if c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
					t.Errorf("%s would have to end before app begins", c.Name)
				}
				sidecar = startSidecar(t, c)
			}
			app := pod.Containers[0]
			for _, p := range []*corev1.Probe{app.StartupProbe, app.ReadinessProbe, app.LivenessProbe} {
				switch {
				case p == nil:
				case p.Exec != nil:
					mounted(t, pod, app, p.Exec.Command[0])
					asHealthCheck(t, p.Exec.Command)
				case sidecar != "":
					wantStatus(t, sidecar+p.HTTPGet.Path, p.HTTPGet.Port.IntValue() == 9105)
				case p.HTTPGet == nil || p.HTTPGet.Path != "/health": // of the server itself: TestDeepHealth
					t.Errorf("%+v", p)
				}
			}
		})
	}
}

// mounted: the program comes from a volume of the pod.
func mounted(t *testing.T, pod corev1.PodSpec, c corev1.Container, program string) {
	t.Helper()
	for _, m := range c.VolumeMounts {
		if m.MountPath == filepath.Dir(program) && slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == m.Name && v.Image != nil }) {
			return
		}
	}
	t.Errorf("%s is in no volume", program)
}

// startSidecar runs mcphealth serve with the arguments of the manifest, for a server
// that lives and one that is dead, and returns where it listens.
func startSidecar(t *testing.T, c corev1.Container) string {
	t.Helper()
	app := startServer(t, "app", serving)
	addr := fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	args := slices.Clone(c.Args)
	for i, a := range args {
		args[i] = strings.NewReplacer("http://127.0.0.1:8000/mcp", app.url(), ":9105", addr).Replace(a)
	}
	args = append(args, "--cache", "1ms", "--target", "dead=http://127.0.0.1:1/mcp")
	bin := mcphealth(t)
	e2e.StartProcess(t, addr, func() *exec.Cmd { return exec.Command(bin, args...) })
	wantStatus(t, "http://"+addr+c.LivenessProbe.HTTPGet.Path, true)
	resp, err := http.Get("http://" + addr + "/health/dead")
	if err != nil || resp.StatusCode != 503 {
		t.Errorf("of a dead one: %v %v", resp, err)
	}
	return "http://" + addr
}

func wantStatus(t *testing.T, url string, port bool) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 200 || !port {
		t.Errorf("GET %s: %d, at the right port: %v", url, resp.StatusCode, port)
	}
}

// The Traefik objects are what Traefik's own definitions take.
func TestTraefikCRDs(t *testing.T) {
	schemas := traefikSchemas(t)
	for _, m := range manifests(t, "traefik/kubernetes.yml") {
		schema := schemas[m.APIVersion+" "+m.Kind]
		if schema == nil {
			t.Errorf("%s %s: Traefik defines no such thing", m.APIVersion, m.Kind)
			continue
		}
		doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(m.raw)))
		if err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(doc); err != nil {
			t.Errorf("%s: %v", m.Kind, err)
		}
	}
	doc, _ := jsonschema.UnmarshalJSON(strings.NewReader(`{"metadata":{},"spec":{"routes":[{"match":"x","kind":"Rule","servces":[]}]}}`))
	if schemas["traefik.io/v1alpha1 IngressRoute"].Validate(doc) == nil {
		t.Error("an unknown key passes: this test sees nothing")
	}
}

// traefikSchemas are the schemas in the definitions that come with Traefik's source,
// by version and kind, with unknown keys refused.
func traefikSchemas(t *testing.T) map[string]*jsonschema.Schema {
	t.Helper()
	cmd := exec.Command("go", "mod", "download", "-json", "github.com/traefik/traefik/v3")
	cmd.Dir = filepath.Join(e2e.Root(), "test/traefik/binary")
	out, err := cmd.Output()
	var module struct{ Dir string }
	if err != nil || json.Unmarshal(out, &module) != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	text, err := os.ReadFile(filepath.Join(module.Dir, "docs/content/reference/dynamic-configuration/kubernetes-crd-definition-v1.yml"))
	if err != nil {
		t.Fatal(err)
	}
	schemas := map[string]*jsonschema.Schema{}
	for _, one := range strings.Split(string(text), "\n---\n") {
		var crd struct {
			Spec struct {
				Group    string
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct{ OpenAPIV3Schema map[string]any }
				}
			}
		}
		if err := yaml.Unmarshal([]byte(one), &crd); err != nil {
			t.Fatal(err)
		}
		for _, v := range crd.Spec.Versions {
			name := crd.Spec.Group + "/" + v.Name + " " + crd.Spec.Names.Kind
			closeSchema(v.Schema.OpenAPIV3Schema)
			c := jsonschema.NewCompiler()
			if err := c.AddResource("crd:"+crd.Spec.Names.Kind, v.Schema.OpenAPIV3Schema); err != nil {
				t.Fatal(err)
			}
			if schemas[name], err = c.Compile("crd:" + crd.Spec.Names.Kind); err != nil {
				t.Fatal(err)
			}
		}
	}
	return schemas
}

// closeSchema refuses, as the API server with strict validation does, keys that a
// structural schema does not name. metadata is Kubernetes' own.
func closeSchema(schema map[string]any) {
	properties, _ := schema["properties"].(map[string]any)
	for name, p := range properties {
		if p, ok := p.(map[string]any); ok && name != "metadata" {
			closeSchema(p)
		}
	}
	for _, key := range []string{"items", "additionalProperties"} {
		if p, ok := schema[key].(map[string]any); ok {
			closeSchema(p)
		}
	}
	if properties != nil && schema["additionalProperties"] == nil && schema["x-kubernetes-preserve-unknown-fields"] == nil {
		schema["additionalProperties"] = false
	}
	if schema["x-kubernetes-preserve-unknown-fields"] == nil && schema["nullable"] == true {
		delete(schema, "type")
	}
}
